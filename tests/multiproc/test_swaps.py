"""Two ranks in training whose kernel is swapped, fails or dies: never mixed, never hung, back where it must be."""

from __future__ import annotations

import gc
import itertools
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from dmuon_runtime.kernels import KERNELS, registered_kernel
from tests.faulty_kernel import Fault, Faulty, Impostor
from tests.worker.gang import Run, Told, run_gang, train_once
from tests.worker.specs import tiny_spec
from worker.contract.messages import Milestone, RankReport
from worker.contract.spec import JobSpec
from worker.rendezvous import connect_store

pytestmark = pytest.mark.multiproc

Body = RankReport | Milestone
NUM_SWAPS = 200
_ENDED = "ended"
"""Key under which the swapped run leaves its number of steps."""
NUM_OF_KERNELS = 150
"""Swaps of kernels and forms, which change no loss but by rounding; coefficient sets, which do, are among the rest."""
TARGETS: tuple[dict[str, str], ...] = (
    {"kernel": "quack"}, {"algorithm": "direct"}, {"kernel": "cute_sm80"}, {"kernel": "cublas"},
    {"kernel": "blocked", "algorithm": "gram"},
)  # fmt: skip
SETS: tuple[dict[str, str], ...] = (
    {"coefficients": "you"}, {"kernel": "quack", "algorithm": "direct"}, {"coefficients": "keller_jordan"},
    {"kernel": "blocked", "algorithm": "gram"}, {"coefficients": "polar_express"},
)  # fmt: skip


SWITCHES: tuple[dict[str, str], ...] = (
    {"kernel": "quack"}, {"algorithm": "direct"}, {"kernel": "cute_sm80"}, {"algorithm": "gram"},
    {"coefficients": "you"}, {"kernel": "cublas"}, {"coefficients": "keller_jordan"},
    {"kernel": "quack", "algorithm": "direct"}, {"algorithm": "gram", "coefficients": "polar_express"},
    {"kernel": "cublas"},
)  # fmt: skip
"""A round of swaps of the kernels that a GPU has; the same one is the 50th and the 200th."""
NUM_GPUS = torch.cuda.device_count()


def orders_on_cpu() -> list[dict[str, str]]:
    """What is asked for on CPUs, in order."""
    kernels = itertools.islice(itertools.cycle(TARGETS), NUM_OF_KERNELS)
    return list(itertools.islice(itertools.chain(kernels, itertools.cycle(SETS)), NUM_SWAPS))


def orders_on_gpu() -> list[dict[str, str]]:
    """What is asked for on GPUs, in order."""
    return list(itertools.islice(itertools.cycle(SWITCHES), NUM_SWAPS))


def spec_of(
    steps: int, *, mesh: dict[str, int] | None = None, num_ranks: int = 2, gpus: float = 0, **kernels: Any
) -> JobSpec:
    """One layer in training on two ranks, or on one that does the sequences of both at once.

    Small on CPUs; on GPUs such that every kernel serves all of its matrices.
    """
    config = {"hidden_size": 512, "intermediate_size": 4096} if gpus else {"hidden_size": 16, "intermediate_size": 24}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1 if gpus else 2}
    return tiny_spec(
        2,
        model={"type": "llama", "config": config},
        data=tiny_spec().data.model_dump(exclude_none=True) | {"sequence_length": 8},
        training={"steps": steps, "global_batch": 2, "micro_batch": 2 // num_ranks, "clip_grad_norm": None},
        optimizer={"muon": {"lr": 2e-4}, "adamw": {"lr": 2e-5}},
        kernels={"kernel": "blocked"} | kernels,
        mesh=mesh or {"shard": num_ranks},
        resources={"cpus_per_worker": 0.5, "gpus_per_worker": gpus},
    )


def hold_never_mixed(ranks: list[Told]) -> list[str]:
    """No step on which ranks applied different kernels, or a rank two; return the kernel by step."""
    by_rank = [[(step.epoch, *step.applied) for step in told.steps] for told in ranks]
    same = all(other == by_rank[0] for other in by_rank[1:])
    assert by_rank[0] and same, "each step has one epoch and the same kernels on all ranks"
    assert all(len(entry) == 2 for entry in by_rank[0]), "and one kernel alone"
    epochs = [epoch for epoch, *_ in by_rank[0]]
    assert epochs == sorted(epochs)
    matrices = {sum(step.applied.values()) for told in ranks for step in told.steps}
    assert len(matrices) <= 2, "every step applies all matrices of a rank, once"
    assert all([s.number for s in t.steps] == list(range(1, len(t.steps) + 1)) for t in ranks), "none is lost or twice"
    return [str(kernel) for _, kernel in by_rank[0]]


def hold_as_asked(ranks: list[Told], first: dict[str, str], orders: Iterable[dict[str, str]]) -> None:
    """Every swap was committed, and each step launched what was asked for last, as often as whenever that ran."""
    chosen, by_epoch = first, {0: first}
    assert not ranks[0].named("swap_rolled_back"), [note.message for note in ranks[0].named("swap_rolled_back")]
    assert len(ranks[0].named("swap_committed")) == NUM_SWAPS
    for order, note in zip(orders, ranks[0].named("swap_prepared"), strict=True):
        chosen = chosen | order
        by_epoch[int(note.data["epoch"] or 0)] = chosen
    for told in ranks:
        seen: defaultdict[tuple[str, ...], set[tuple[Any, ...]]] = defaultdict(set)
        for step in told.steps:
            asked = by_epoch[step.epoch]
            algorithms = {algorithm for _, algorithm in step.launched}
            assert {kernel for kernel, _ in step.launched} == set(step.applied) == {asked["kernel"]}, (step, asked)
            assert asked["algorithm"] in algorithms, (step, asked)
            assert asked["algorithm"] == "gram" or algorithms == {"direct"}, (step, asked)
            seen[tuple(asked.values())].add((*sorted(step.launched.items()), *step.applied.items()))
        assert all(len(counts) == 1 for counts in seen.values()), f"one choice, one number of launches: {dict(seen)}"
        assert not any(step.offenders for step in told.steps), "all launched what was chosen"
        assert sum(step.fallback_calls for step in told.steps) == 0
        assert all(math.isfinite(step.loss) for step in told.steps)


def silent(run: Run, body: Body) -> None:
    """Say nothing."""


def _alone(addresses: list[str]) -> tuple[Told, list[float]]:
    """Train on without swaps, beside the two ranks, until as many steps are done as they did."""
    ended = connect_store(addresses[0], 60)

    def follow(run: Run, body: Body) -> None:
        done = len(run.told.steps)
        if done % 10 == 0 and ended.check([_ENDED]) and done >= int(ended.get(_ENDED)):
            run.mailbox.stop()

    alone = train_once(spec_of(20_000, num_ranks=1), addresses[1], 0, follow)
    return alone, [step.loss for step in alone.steps]


def swapping(rank: int, orders: list[dict[str, str]]) -> Callable[[Run, Body], None]:
    """On rank 0: order one swap after the other and stop; note what is held after a quarter of them and after all."""
    waiting = iter(orders)

    def drive(run: Run, body: Body) -> None:
        if rank or not isinstance(body, Milestone):
            return
        facts, asked = run.told.facts, run.policy.epoch
        assert body.name != "swap_rolled_back", body.message
        if body.name in ("plan_confirmed", "swap_prepared") and asked < NUM_SWAPS:
            run.swap(**next(waiting))  # the next one is taken up as soon as this one is proved
        if body.name != "swap_committed":
            return
        done = facts["done"] = facts.get("done", 0) + 1
        if done == NUM_OF_KERNELS:
            facts["steps"] = len(run.told.steps)
        if done in (NUM_SWAPS // 4, NUM_SWAPS):
            gc.collect()
            num_tensors = sum(type(item) is torch.Tensor for item in gc.get_objects())
            bytes_held = run.told.steps[-1].memory_bytes, torch.cuda.memory_reserved()
            facts[done] = (num_tensors, threading.active_count(), *bytes_held)
        if done == NUM_SWAPS:
            run.mailbox.stop()

    return drive


def hold_nothing_grew(told: Told) -> None:
    """No more tensors or threads after 200 swaps than after 50, and no more memory, on a GPU its allocator's too."""
    early, late = told.facts[NUM_SWAPS // 4], told.facts[NUM_SWAPS]
    assert late[0] <= early[0] and late[1] == early[1], f"tensors and threads: {early[:2]}, and after all {late[:2]}"
    assert late[2] - early[2] < 12 << 20, f"bytes held grew from {early[2]} to {late[2]}"
    assert late[3] - early[3] < 64 << 20, f"bytes that the device's allocator took grew from {early[3]} to {late[3]}"


def _many_swaps(rank: int, addresses: list[str]) -> tuple[Told, list[float]]:
    if rank == 2:
        return _alone(addresses)
    with ExitStack() as stack:
        for name in ("quack", "cute_sm80"):  # what needs a GPU is played by others under its name
            stack.enter_context(registered_kernel(Faulty("none", name=name)))
        spec = spec_of(20_000, mesh={"replicate": 2})
        swapped = train_once(spec, addresses[0], rank, swapping(rank, orders_on_cpu()))
    if rank == 0:
        connect_store(addresses[0], 60).set(_ENDED, str(len(swapped.steps)))
    return swapped, []


@pytest.mark.timeout(240)
def test_two_hundred_swaps_under_load() -> None:
    *answers, (_, losses) = run_gang(3, _many_swaps, num_stores=2, deadline_s=200)
    ranks = [swapped for swapped, _ in answers]
    assert set(hold_never_mixed(ranks)) == {"blocked", "cublas", "quack", "cute_sm80"}
    first = {"kernel": "blocked", "algorithm": "gram", "coefficients": "polar_express"}
    hold_as_asked(ranks, first, orders_on_cpu())
    told = ranks[0]
    assert told.steps[-1].epoch >= NUM_SWAPS
    found, same = [step.loss for step in told.steps], told.facts["steps"]
    losses = losses[: len(found)]
    assert len(losses) == len(found)
    assert found[:same] == pytest.approx(losses[:same], rel=1e-5), "as if nothing had been swapped, in every step"
    assert found[same:] == pytest.approx(losses[same:], rel=1e-3), "another set of coefficients is another iteration"
    assert found[-1] != pytest.approx(losses[-1], rel=1e-5), "and shows that it ran"
    hold_nothing_grew(told)


def _swaps_on_gpus(rank: int, addresses: list[str]) -> Told:
    kernels = {"kernel": "cublas", "breaker": {"slow_factor": 1e3}}  # on matrices this small speed says nothing
    spec = spec_of(20_000, gpus=1 if NUM_GPUS > 1 else 0.5, **kernels)
    return train_once(spec, addresses[0], rank, swapping(rank, orders_on_gpu()))


@pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device")
@pytest.mark.timeout(300)
def test_two_hundred_swaps_of_the_kernels_of_a_gpu() -> None:
    """Two ranks, which share the GPU where there is one."""
    answers = {name: KERNELS[name].available(torch.device("cuda", 0)) for name in ("quack", "cute_sm80")}
    missing = [f"{name}: {detail}" for name, (available, detail) in answers.items() if not available]
    if missing:
        pytest.skip("; ".join(missing))
    ranks = run_gang(2, _swaps_on_gpus, deadline_s=280)
    assert set(hold_never_mixed(ranks)) == {"cublas", "quack", "cute_sm80"}
    hold_as_asked(ranks, {"kernel": "cublas", "algorithm": "gram", "coefficients": "polar_express"}, orders_on_gpu())
    hold_nothing_grew(ranks[0])
    print(f"{len(ranks)} ranks, {len(ranks[0].steps)} steps, {NUM_SWAPS} swaps; held: {ranks[0].facts}")


def until(names: tuple[str, ...], then: Callable[[Run], None], deadline_s: float = 60.0) -> Callable[[Run, Body], None]:
    """On rank 0: order a swap to ``quack`` when training is about to begin, and do ``then`` at one of ``names``."""

    def drive(run: Run, body: Body) -> None:
        if run.rank == 0 and isinstance(body, Milestone):
            if body.name == "plan_confirmed":
                run.swap(deadline_s=deadline_s, kernel="quack")
            elif body.name in names:
                then(run)

    return drive


def stop(run: Run) -> None:
    """End the run."""
    run.mailbox.stop()


def _refusals(rank: int, addresses: list[str]) -> dict[str, Told]:
    """One refuses by its numbers, one is late, one fails in the step of the change, one has another kernel do it."""
    released, done = threading.Event(), ("swap_rolled_back", "swap_committed")
    healthy, late = Faulty("none", name="quack"), Faulty("none", name="quack", off_main=released.wait)
    found: dict[str, Told] = {}

    def again(run: Run) -> None:
        """After the first swap: the second meets a thread that still runs, the third a free one."""
        facts = run.told.facts
        facts["outcomes"] = facts.get("outcomes", 0) + 1
        if facts["outcomes"] == 3:
            stop(run)
        else:
            run.swap(deadline_s=30.0, kernel="quack", **({"coefficients": "you"} if facts["outcomes"] == 2 else {}))

    def release(run: Run, body: Body) -> None:
        until(done, again, deadline_s=0.5)(run, body)
        if isinstance(body, Milestone) and body.name == "swap_refused":
            released.set()
            time.sleep(0.1)

    wrong = Faulty("none", name="quack")
    wrong.rectangular = lambda left, right: 1.5 * torch.bmm(left, right)  # type: ignore[method-assign]
    wrong.add_identity = lambda z, a: z  # type: ignore[method-assign]
    with registered_kernel(wrong if rank == 1 else healthy):
        found["wrong"] = train_once(spec_of(5000), addresses[0], rank, until(done, stop))
    with registered_kernel(late if rank == 1 else healthy):
        found["late"] = train_once(spec_of(5000), addresses[1], rank, release)
    with registered_kernel(Faulty("raise" if rank == 1 else "none", name="quack")):
        found["raises"] = train_once(spec_of(5000), addresses[2], rank, until(done, stop))
    with registered_kernel(Impostor("none", name="quack") if rank == 1 else healthy):
        found["impostor"] = train_once(spec_of(5000), addresses[3], rank, until(done, stop))
        found["from the start"] = train_once(spec_of(2, kernel="quack"), addresses[4], rank, silent)
    return found


@pytest.mark.timeout(120)
def test_a_rank_that_refuses_is_late_fails_or_does_something_else_takes_all_ranks_back() -> None:
    ranks = run_gang(2, _refusals, num_stores=5)
    kernels = {name: hold_never_mixed([told[name] for told in ranks]) for name in ranks[0]}
    at_once = ranks[1].pop("from the start").named("routes_verified")[0]
    assert not at_once.data["ok"] and "step 1 launched cublas where quack was chosen" in at_once.message
    assert ranks[0].pop("from the start").named("routes_verified")[0].data["ok"], "each rank speaks for itself"
    last = {name: told.named("swap_rolled_back")[-1].message for name, told in ranks[0].items()}
    refusal = ranks[1]["wrong"].named("swap_refused")[0].message
    assert "rank 1 refuses the swap: on a random" in refusal and last["wrong"] == "rank 1 refused"
    assert set(kernels["wrong"]) == {"blocked"}, "nothing was launched by what was not ready"

    late = ranks[0]["late"]
    assert [note.message for note in late.named("swap_rolled_back")] == [
        "not all ranks were ready within 0.5 s", "rank 1 refused",
    ]  # fmt: skip
    assert "earlier swap still runs" in ranks[1]["late"].named("swap_refused")[0].message
    assert len(late.named("swap_committed")) == 1 and set(kernels["late"]) == {"blocked", "quack"}

    assert set(kernels["raises"]) == {"blocked", "cublas"}, "the fallback did the step of the change everywhere"
    assert kernels["raises"][-1] == "blocked" and last["raises"].endswith("launched something else")
    failed = ranks[1]["raises"].named("kernel_failed")[0]
    assert failed.data["cause"] == "exception" and "launch 0 failed" in failed.message
    assert ranks[1]["raises"].steps[-1].fallback_calls > 0 == ranks[0]["raises"].steps[-1].fallback_calls
    moved = [(note.data["kernel"], note.data["to"]) for note in ranks[0]["raises"].named("breaker_changed")]
    assert ("quack", "open") in moved

    assert last["impostor"] == "rank 1 launched something else", "whatever it is called"
    refusal = ranks[1]["impostor"].named("swap_refused")[0].message
    assert "launched cublas direct and cublas gram, and quack direct and quack gram was asked for" in refusal
    offenders = {name: {step.offenders for step in told.steps} for name, told in ranks[1].items()}
    assert {len(found) for name, found in offenders.items() if name != "impostor"} == {1}, offenders
    assert len(offenders["impostor"]) == 2, "what nobody chose is told from that step on"
    assert all("launched cublas where quack was chosen" in said for (said,) in offenders["impostor"] - {()})


FAULTS: dict[Fault, tuple[str, float]] = {
    "raise": ("exception", 0.0), "nan": ("non_finite", 0.0), "wrong": ("relative_error", 0.03), "slow": ("slow", 0.01),
}  # fmt: skip
BREAKER = {
    "check_every_calls": 1, "window": 3, "minimum_calls": 3, "slow_rate": 1.0, "slow_factor": 50.0, "open_s": 0.2,
    "max_open_s": 0.2, "half_open_calls": 2, "half_open_s": 30.0,
}  # fmt: skip
"""A slow launch takes 10 ms, and a call has some twenty; a whole call of the fallback takes half a millisecond."""


def _trips(rank: int, addresses: list[str]) -> dict[Fault, Told]:
    """A kernel that fails on rank 1 from its 300th launch on until its breaker has opened, and is well again then."""
    found: dict[Fault, Told] = {}
    for address, (fault, (_, amount)) in zip(addresses, FAULTS.items(), strict=True):
        kernel = Faulty(fault if rank == 1 else "none", name="quack", begin=300, amount=amount)

        def drive(run: Run, body: Body, kernel: Faulty = kernel) -> None:
            if rank == 1 and isinstance(body, RankReport) and "cublas" in run.told.steps[-1].applied:
                kernel.end = kernel.launches if kernel.end == float("inf") else kernel.end
            changes = [note.data["to"] for note in run.told.named("breaker_changed")]
            if rank == 0 and changes.count("closed") == changes.count("open") > 0:
                run.told.facts["well"] = run.told.facts.get("well", 0) + 1
                if run.told.facts["well"] == 20:
                    stop(run)

        with registered_kernel(kernel):
            spec = spec_of(5000, kernel="quack", breaker=BREAKER)
            found[fault] = train_once(spec, address, rank, drive)
    return found


@pytest.mark.timeout(120)
def test_a_breaker_trips_by_itself_for_each_cause_and_closes_again_on_all_ranks() -> None:
    ranks = run_gang(2, _trips, num_stores=len(FAULTS))
    for fault, (cause, _) in FAULTS.items():
        kernels = hold_never_mixed([told[fault] for told in ranks])
        runs = [name for name, _ in itertools.groupby(kernels)]
        assert runs[:3] == ["quack", "cublas", "quack"] and kernels[-1] == "quack", (fault, runs)
        changes = ranks[0][fault].named("breaker_changed")
        assert changes[0].data["to"] == "open" and changes[0].data["reason"] == f"{cause} on rank 1"
        assert [note.data["to"] for note in changes][-2:] == ["half_open", "closed"]
        told = ranks[1][fault].named("kernel_failed")
        assert told[0].data["cause"] == cause and not ranks[0][fault].named("kernel_failed")
        calls = ranks[1][fault].steps[-1].fallback_calls
        assert (calls > 0) == (fault != "slow"), "a slow result is a result"
        assert all(step.loss == other.loss and step.loss < 10 for step, other in zip(
            ranks[0][fault].steps, ranks[1][fault].steps, strict=True))  # fmt: skip


def _lost(number: int, addresses: list[str]) -> tuple[str, float] | None:
    """Three pairs: rank 1 of each dies while it prepares, dies in the step of the change, or stalls there."""
    pair, rank = divmod(number, 2)
    begin = [0.0]

    def hit(run: Run, body: Body) -> None:
        until((), stop)(run, body)
        if rank == 1 and pair and isinstance(body, RankReport) and "quack" in run.told.steps[-1].applied:
            time.sleep(6.0 if pair == 2 else 0.0)
            os._exit(3)
        begin[0] = time.monotonic()

    dies = pair == 0 and rank == 1
    kernel = Faulty("none", name="quack", off_main=(lambda: os._exit(3)) if dies else (lambda: None))
    with registered_kernel(kernel):
        try:
            train_once(spec_of(100_000), addresses[pair], rank, hit, collective_timeout_s=3.0)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - begin[0]
    return None


@pytest.mark.timeout(120)
def test_a_rank_that_dies_or_stalls_in_either_phase_ends_the_attempt_of_all() -> None:
    """The survivors get an error within the time of a collective: the job's restart is the way back, nothing hangs."""
    ends = run_gang(6, _lost, num_stores=3, deadline_s=60)
    for pair in range(3):
        survivor = ends[2 * pair]
        assert survivor is not None, "training on alone is no way out"
        assert survivor[1] < 20, survivor
