"""Case 10: the series of dead jobs and dead processes live on, or totals go backwards when they vanish."""

from __future__ import annotations

from tests.orchestrator.conftest import World, database_kind, database_url, postgres, settings, world
from tests.orchestrator.test_exporter import scrape, value
from tests.orchestrator.test_swaps import ask, tell
from worker.contract.states import Reason

__all__ = ["database_kind", "database_url", "postgres", "settings", "world"]


def test_a_job_that_swapped_and_tripped_leaves_nothing_but_totals(world: World) -> None:
    """It ends because a worker was killed; breakers, epochs and swaps of it are gone a grace period later."""
    job = world.running(failure={"infrastructure_restarts": 0})
    world.attempt(job).steps(1, 2)
    swap = ask(world, job)
    world.turn()
    moved = {"kernel": "blocked", "size_class": 64, "dtype": "float32", "step": 2, "epoch": 1, "reason": "x"}
    tell(world, job, "breaker_changed", **moved, **{"from": "closed", "to": "open"})
    tell(world, job, "swap_committed", swap=swap["number"], step=2, epoch=1)
    before = scrape(world)
    assert value(before, "dmuon_breaker_state", job=job, kernel="blocked", state="open") == 1
    world.attempt(job).end(Reason.WORKER_LOST, "rank 1 was killed")
    world.turn(2)
    world.clock.advance(2 * world.settings.metrics_grace_s)
    after = scrape(world)
    assert not [name for name, labels in after if ("job", job) in labels]
    assert not [name for name, labels in after if "pid" in dict(labels)]
    service_wide = {key: old for key, old in before.items() if key[0].endswith("_total") and "job" not in dict(key[1])}
    assert value(after, "dmuon_kernel_swaps_total", result="committed") == 1
    assert all(after[key] >= old for key, old in service_wide.items()), "totals never go down"
