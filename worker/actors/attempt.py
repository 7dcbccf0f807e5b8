"""One attempt from placement to its verified end. Runs in a thread of the supervisor."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group

from worker.actors._cleanup import dead_nodes, describe_cluster, kill_and_verify, remove_group
from worker.actors.rank import RankActor
from worker.actors.watch import Watch, stacks_of
from worker.contract.actors import NAMESPACE, rank_name
from worker.contract.errors import ErrorValue
from worker.contract.kernels import KernelPolicy
from worker.contract.messages import (
    AttemptEnd,
    AttemptStart,
    Milestone,
    RankError,
    RankReport,
    StopRequest,
)
from worker.contract.spec import JobSpec
from worker.contract.states import Reason
from worker.outbox import Outbox
from worker.outcome import EndKind, RankEnd, decide_end
from worker.watchdog import Stall

__all__ = ["Attempt"]

_log = logging.getLogger(__name__)
_POLL_S = 0.2
_LOST_SIGNS = (
    "unexpectedly exits with a connection error",
    "NODE_DIED",
    "node was terminated",
    "node died",
    "OutOfMemory",
)
"""What Ray writes of an actor that did not leave by itself."""
_GRACE_S = 1.5
"""After the first failure: time for the other ranks to tell their own, before they are killed."""


class _Ended(Exception):
    """The attempt is over before or beside what the ranks return."""

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason, self.message = reason, message
        super().__init__(reason, message)


class Attempt:
    """Places, starts, watches and clears away the ranks of one attempt."""

    def __init__(
        self, start: AttemptStart, outbox: Outbox, supervisor: Any, rank_class: type[RankActor] = RankActor
    ) -> None:
        self.start = start
        self._rank_class = rank_class
        self._outbox, self._supervisor = outbox, supervisor
        self._spec = JobSpec.model_validate_json(start.spec_json)
        self._stop: StopRequest | None = None
        self._stopping = threading.Event()
        self._policy = start.kernels
        self._group: Any = None
        self._actors: list[Any] = []
        self._where: list[dict[str, str | int]] = []
        self._prepared = False
        self._formed = False
        self._ends: dict[int, RankEnd] = {}
        self._failing: dict[int, RankEnd] = {}
        """Ranks that have told an error and not ended yet: they may wait for others before they can."""

    @property
    def alive_ranks(self) -> int:
        """Ranks whose actor was made and has not ended."""
        return 0 if self._outbox.ended else len(self._actors) - len(self._ends)

    def stop(self, request: StopRequest) -> None:
        """Ask for the end; the first request counts."""
        if self._stop is None:
            self._stop = request
            self._stopping.set()

    def set_kernels(self, policy: KernelPolicy) -> None:
        """Take a newer policy, and pass it to rank 0 as soon as that can hear it."""
        if policy.epoch > self._policy.epoch:
            self._policy = policy
            if self._prepared:
                self._actors[0].set_kernels.remote(policy.model_dump_json())

    def observe(self, body: RankReport | Milestone | RankError | AttemptEnd) -> None:
        """Look at what a rank tells on its way to the outbox."""
        if body.kind == "milestone" and body.name == "group_formed":
            self._formed = True
        if body.kind == "rank_error" and body.error.rank is not None:
            self._failing[body.error.rank] = RankEnd(
                rank=body.error.rank, kind=EndKind.FAILED, at=body.at, set_up=self._formed, error=body.error
            )

    def run(self) -> None:
        """Do everything; the last entry of the outbox is the end."""
        try:
            self._place()
            self._start_workers()
            address = self._prepare()
            self._watch(address)
            ends = {**self._failing, **self._ends}
            reason, message = decide_end(list(ends.values()), self._spec.world_size, self._stop)
        except _Ended as ended:
            reason, message = ended.reason, ended.message
        except Exception as error:  # our own bug: the attempt must still end, and say so
            _log.exception("attempt %s of job %s failed", self.start.attempt, self.start.job_id)
            reason, message = Reason.INTERNAL, str(ErrorValue.from_exception(error))
        problems = self._clear_away()
        if reason is Reason.WORKER_LOST and (nodes := dead_nodes(self._where)):
            reason, message = Reason.NODE_LOST, f"{nodes}; {message}"
        text = "; ".join([message, *problems])
        self._outbox.append(AttemptEnd(at=time.time(), reason=reason, message=text))

    def _tell(self, name: str, message: str, rank: int | None = None, **data: str | int) -> None:
        fields = {"name": name, "at": time.time(), "message": message, "rank": rank, "data": data}
        self._outbox.append(Milestone.model_validate(fields))

    def _bundle(self) -> dict[str, float]:
        resources = self._spec.resources
        bundle = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
        bundle["memory"] = float(resources.memory_bytes_per_worker or 0)
        return {name: amount for name, amount in bundle.items() if amount}

    def _place(self) -> None:
        """Reserve room for all ranks or none."""
        size, bundle = self._spec.world_size, self._bundle()
        self._group = placement_group([bundle] * size, strategy="PACK", name=f"job:{self.start.job_id}")
        asked = f"{size} workers of " + ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
        try:
            self._await([self._group.ready()], self.start.placement_deadline_s, "placement")
        except GetTimeoutError:
            raise _Ended(
                Reason.INFEASIBLE,
                f"asked for {asked}, which was not to be had within {self.start.placement_deadline_s:g} s; "
                f"{describe_cluster()}. Ask for less under /resources or /mesh, or add nodes",
            ) from None
        self._tell("placed", f"room for {asked}")

    def _start_workers(self) -> None:
        attempt_json = self.start.model_dump_json()
        resources = self._spec.resources
        for rank in range(self._spec.world_size):
            options = ray.remote(self._rank_class).options(
                num_cpus=resources.cpus_per_worker,
                num_gpus=resources.gpus_per_worker,
                memory=resources.memory_bytes_per_worker or 0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=rank
                ),
                max_restarts=0,
                max_concurrency=6,
                name=rank_name(self.start.job_id, self.start.attempt, rank),
                namespace=NAMESPACE,
            )
            self._actors.append(options.remote(attempt_json, rank))
        self._where = self._set_up(lambda actor, rank: actor.hello.remote(), "starting the workers")
        nodes = sorted({str(place["host"]) for place in self._where})
        self._tell("workers_started", f"{len(self._actors)} workers on {', '.join(nodes)}", nodes=len(nodes))

    def _prepare(self) -> str:
        """Import torch everywhere and open the store on rank 0; return the store's address."""
        answers: list[str] = self._set_up(lambda actor, rank: actor.prepare.remote(rank == 0), "importing torch")
        broken = [ErrorValue.model_validate_json(text) for text in answers if text.startswith("{")]
        for error in broken:
            self._outbox.append(RankError(at=time.time(), error=error))
        if broken:
            raise _Ended(Reason.SETUP_FAILED, f"a worker cannot be set up: {broken[0]}")
        self._prepared = True
        if self._policy.epoch > self.start.kernels.epoch:
            self._actors[0].set_kernels.remote(self._policy.model_dump_json())
        return answers[0]

    def _set_up(self, call: Callable[[Any, int], Any], what: str) -> list[Any]:
        """Call every actor and return the answers; a failure or the deadline ends the attempt."""
        deadline_s = self._spec.failure.start_deadline_s
        try:
            return self._await([call(actor, rank) for rank, actor in enumerate(self._actors)], deadline_s, what)
        except GetTimeoutError:
            message = f"{what} was not done within {deadline_s:g} s (/failure/start_deadline_s)"
        except RayError as error:
            message = f"{what} failed: {str(error).strip()}"
            if any(sign in message for sign in _LOST_SIGNS):
                raise _Ended(Reason.WORKER_LOST, message) from None
        raise _Ended(Reason.SETUP_FAILED, message)

    def _await(self, refs: list[Any], deadline_s: float, what: str) -> list[Any]:
        """Return the results; raises GetTimeoutError at the deadline, and _Ended when a stop is asked for."""
        deadline, waiting = time.monotonic() + deadline_s, list(refs)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=_POLL_S)
            for ref in ready:
                ray.get(ref)
            if self._stop is not None:
                raise _Ended(self._stop.reason, self._stop.message)
            if waiting and time.monotonic() > deadline:
                raise GetTimeoutError(what)
        return list(ray.get(refs))

    def _watch(self, address: str) -> None:
        """Run all ranks, and return when they have ended or have had the time to."""
        pending = {actor.run.remote(address, self._supervisor): rank for rank, actor in enumerate(self._actors)}
        form_by = time.monotonic() + self._spec.failure.start_deadline_s
        watch = Watch(self._actors, self._spec.watchdog)
        give_up = float("inf")
        told = False
        while pending and time.monotonic() < give_up:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_S)
            for ref in ready:
                end = self._collect(pending.pop(ref), ref)
                self._ends[end.rank] = end
            if self._failing or any(end.kind in (EndKind.FAILED, EndKind.LOST) for end in self._ends.values()):
                give_up = min(give_up, time.monotonic() + _GRACE_S)
            if self._stop is not None and not told:
                told = True
                self._tell("stopping", self._stop.message, reason=str(self._stop.reason))
                self._actors[0].stop.remote()
                give_up = min(give_up, time.monotonic() + self._stop.patience_s)
            stall = watch.look(set(pending.values()))
            if stall is not None:
                self._on_stall(stall, watch)
            self._check_formed(form_by, bool(pending))

    def _check_formed(self, form_by: float, anybody: bool) -> None:
        if not self._formed and anybody and time.monotonic() > form_by and self._stop is None:
            deadline_s = self._spec.failure.start_deadline_s
            raise _Ended(Reason.SETUP_FAILED, f"the process group was not formed within {deadline_s:g} s")

    def _on_stall(self, stall: Stall, watch: Watch) -> None:
        """Tell of it with every rank's stacks, and end the attempt unless the spec only wants to know."""
        ranks = ",".join(map(str, stall.ranks))
        self._tell("stalled", stall.message, ranks=ranks, phase=stall.phase, collective=stall.collective)
        beats = watch.beats
        for rank, text in enumerate(stacks_of(self._where)):
            self._tell("stacks", f"rank {rank} is {beats.get(rank, 'silent')}", rank=rank, stacks=text)
        if self._spec.watchdog.action != "report" and self._stop is None and not self._failing:
            raise _Ended(Reason.STALLED, stall.message)

    def _collect(self, rank: int, ref: Any) -> RankEnd:
        """Return how a rank ended; one whose process vanished gets an error entry in its place."""
        try:
            return RankEnd.model_validate_json(ray.get(ref))
        except RayError as error:
            value = ErrorValue(type=_type_name(error), message=" ".join(str(error).split()), rank=rank)
            self._outbox.append(RankError(at=time.time(), error=value))
            return RankEnd(rank=rank, kind=EndKind.LOST, at=time.time(), set_up=self._formed, detail=value.message)

    def _clear_away(self) -> list[str]:
        """Kill the ranks and give back the room; return what could not be verified."""
        problems: list[str] = []
        steps: tuple[Callable[[], list[str]], ...] = (
            lambda: kill_and_verify(self._actors, self._where),
            lambda: remove_group(self._group),
        )
        for step in steps:
            try:
                problems += step()
            except Exception as error:  # each part is tried, whatever became of the one before
                _log.exception("clearing away attempt %s of job %s", self.start.attempt, self.start.job_id)
                problems.append(f"clearing away failed: {error}")
        return problems


def _type_name(error: Exception) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"
