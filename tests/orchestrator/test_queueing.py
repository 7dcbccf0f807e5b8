"""Decisions about the queue, as tables."""

from __future__ import annotations

from typing import Any

from orchestrator.launcher_api import Capacity, Resources
from orchestrator.quota import Quota, Usage
from orchestrator.reconcile.queueing import STARVATION_S, Waiting, WaitReason, decide_admissions

GiB = float(2**30)


def waiting(name: str, workers: int = 1, cpus: float = 1.0, **changes: Any) -> Waiting:
    return Waiting(**{"job_id": name, "worker": Resources(cpus), "workers": workers, "waited_s": 0.0} | changes)


def started(jobs: list[Waiting], total: float, free: float, reserved: float = 0.0, **more: Any) -> str:
    capacity = Capacity((Resources(total),), Resources(free))
    return "".join(d.job_id for d in decide_admissions(jobs, capacity, Resources(reserved), **more) if d.start)


def test_gangs_are_admitted_whole_and_in_order() -> None:
    jobs = [waiting("a", 2), waiting("b", 3), waiting("c", 1)]
    assert started(jobs, 8, 8) == "abc"
    assert started(jobs, 8, 4) == "ac"  # a small one may pass
    assert started(jobs, 8, 1) == "c"
    assert started(jobs, 8, 4, reserved=3) == "c"


def test_a_job_that_starved_is_passed_by_none() -> None:
    jobs = [waiting("a", 4, waited_s=STARVATION_S + 1), waiting("b")]
    assert started(jobs, 4, 2) == ""
    assert started(jobs, 8, 8) == "ab"


def test_priority_goes_before_age() -> None:
    jobs = [waiting("a", 3), waiting("b", 3, priority=5), waiting("c", 3, priority=5), waiting("d", 1, priority=-1)]
    assert started(jobs, 8, 3) == "b"
    assert started(jobs, 8, 7) == "bcd"
    starved = [waiting("a", 4, waited_s=STARVATION_S + 1), waiting("b", 2, priority=1), waiting("c", 1)]
    assert started(starved, 4, 3) == "b", "who starved holds up no job of a higher priority"


def test_room_that_others_make_is_taken_by_none_but_the_one_it_is_for() -> None:
    jobs = [waiting("a", 4, priority=9), waiting("b")]
    assert started(jobs, 4, 2) == "b"
    assert started(jobs, 4, 2, making_room=True) == ""


def test_quotas_bound_what_runs_at_once() -> None:
    quotas = {"p": Quota(cpus=4, jobs=2)}
    jobs = [waiting("a", 3, project="p"), waiting("b", 2, project="p"), waiting("c", 1, project="p"), waiting("d", 9)]
    assert started(jobs, 20, 20, quotas=quotas) == "acd"
    capacity = Capacity((Resources(20),), Resources(20))
    used = {"p": Usage(resources=Resources(2), jobs=1)}
    a, b, c, _ = decide_admissions(jobs, capacity, Resources(), quotas=quotas, used=used)
    assert (a.reason, b.start, c.reason) == (WaitReason.QUOTA, True, WaitReason.QUOTA)
    assert a.message == "project p may use 4 CPUs, of which 2 are used and this job asks for 3"
    assert c.message.endswith("2 jobs, of which 2 are used and this job asks for 1")


def test_a_job_above_its_quota_is_refused_with_both_figures() -> None:
    (found,) = decide_admissions(
        [waiting("a", 5, project="p")],
        Capacity((Resources(8),), Resources(8)),
        Resources(),
        quotas={"p": Quota(cpus=4)},
    )
    assert found.errors[0].pointer == "/project"
    assert "asks for 5 CPUs; project p may use 4 at once" in found.errors[0].message


def test_room_is_counted_by_machine() -> None:
    capacity = Capacity((Resources(3), Resources(3)), Resources(6))
    (wide,) = decide_admissions([waiting("a", 1, cpus=4)], capacity, Resources())
    assert wide.errors[0].pointer == "/resources" and "largest machine has 3 CPUs" in wide.errors[0].message
    (many,) = decide_admissions([waiting("b", 3, cpus=2)], capacity, Resources())
    assert many.errors[0].pointer == "/mesh" and "room for 2" in many.errors[0].message
    (fits,) = decide_admissions([waiting("c", 2, cpus=2)], capacity, Resources())
    assert fits.start


def test_a_model_that_cannot_fit_is_refused_with_figures() -> None:
    node = Resources(8, 0, 16 * GiB)
    capacity = Capacity((node, node), Resources(16, 0, 32 * GiB))
    (big,) = decide_admissions([waiting("a", 2, planned_bytes=17 * GiB)], capacity, Resources())
    assert big.errors[0].pointer == "/model"
    assert "at least 17.00 GiB" in big.errors[0].message and "16.00 GiB, hold 0 such workers" in big.errors[0].message
    (many,) = decide_admissions([waiting("a", 3, planned_bytes=9 * GiB)], capacity, Resources())
    assert "hold 2 such workers" in many.errors[0].message
    fits = [waiting("a", 2, planned_bytes=15 * GiB), waiting("b", worker=Resources(1, 0, 16 * GiB), planned_bytes=GiB)]
    assert all(not found.errors for found in decide_admissions(fits, capacity, Resources()))
    gpu = waiting("g", worker=Resources(1, 1), planned_bytes=17 * GiB)
    with_gpu = Capacity((Resources(8, 1, 16 * GiB),), Resources(8, 1, 16 * GiB))
    (found,) = decide_admissions([gpu], with_gpu, Resources())
    assert found.start, "what lies on a GPU is not held against the memory of its machine"


def test_a_cluster_without_machines_is_no_verdict() -> None:
    (found,) = decide_admissions([waiting("a")], Capacity((), Resources()), Resources())
    assert not found.start and not found.errors and found.reason is WaitReason.NO_MACHINE


def test_every_decision_has_its_reason_and_place() -> None:
    jobs = [waiting(str(number), number % 5 + 1, priority=number % 3, project="pq"[number % 2]) for number in range(60)]
    found = decide_admissions(
        jobs, Capacity((Resources(8),), Resources(6)), Resources(), quotas={"p": Quota(jobs=1)}, used={}
    )
    assert [decision.job_id for decision in found] == [job.job_id for job in jobs]
    assert all(decision.start or decision.errors or (decision.reason and decision.message) for decision in found)
    taken = sum(job.workers for job, decision in zip(jobs, found, strict=True) if decision.start)
    assert taken <= 6
