"""Asking every rank where it is, and the stacks of all of them when one does not get on."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from worker.actors._stacks import capture_stacks
from worker.contract.failure import WatchdogSpec
from worker.watchdog import Beat, Seen, Stall, decide_stall

__all__ = ["Watch", "stacks_of"]

_EVERY_S = 1.0
"""Between an answer and the next question."""
_CAPTURE_S = 10.0
_LOOK_S = 5.0
"""The most of a pause between two looks that counts as silence of the ranks: in a longer one nobody listened."""

Place = dict[str, str | int]


class Watch:
    """Asks without waiting; a rank that has not answered yet is not asked again."""

    def __init__(self, actors: list[Any], deadlines: WatchdogSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._actors, self._deadlines, self._clock = actors, deadlines, clock
        self._asked: dict[int, Any] = {}
        self._beats: dict[int, Beat] = {}
        self._looked = clock()
        self._heard = dict.fromkeys(range(len(actors)), self._looked)
        self._told: tuple[int, ...] = ()

    @property
    def beats(self) -> dict[int, Beat]:
        """The last answer of each rank that has answered."""
        return dict(self._beats)

    def look(self, running: set[int]) -> Stall | None:
        """Take answers, ask again, and return a stall once; ``running`` are the ranks that have not ended."""
        now = self._clock()
        unheard_s = max(0.0, now - self._looked - _LOOK_S)
        self._looked = now
        for rank in running:
            self._heard[rank] += unheard_s  # this process stood still: that says nothing about the ranks
            self._hear(rank, now)
            if rank not in self._asked and now - self._heard[rank] >= (_EVERY_S if rank in self._beats else 0.0):
                self._asked[rank] = self._actors[rank].beat.remote()
        seen = {rank: Seen(self._beats.get(rank), now - self._heard[rank]) for rank in running}
        stall = decide_stall(seen, self._deadlines)
        fresh = stall is not None and stall.ranks != self._told
        self._told = () if stall is None else stall.ranks
        return stall if fresh else None

    def _hear(self, rank: int, now: float) -> None:
        reference = self._asked.get(rank)
        if reference is None or not ray.wait([reference], timeout=0)[0]:
            return
        del self._asked[rank]
        try:
            self._beats[rank], self._heard[rank] = Beat.model_validate_json(ray.get(reference)), now
        except RayError:
            return  # it is dead or cannot be reached: its run says which, or its silence counts on


def stacks_of(where: list[Place]) -> list[str]:
    """Return the stacks of every rank, by rank, each asked on its own node; or why there are none.

    Args:
        where: of each rank: ``node_id``, ``pid``, ``started`` and ``stacks`` (a descriptor).
    """
    by_node: defaultdict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(where):
        by_node[str(place["node_id"])].append(rank)
    here, texts = ray.get_runtime_context().get_node_id(), [""] * len(where)
    for node_id, ranks in by_node.items():
        processes = [(int(where[r]["pid"]), int(where[r]["started"]), int(where[r]["stacks"])) for r in ranks]
        found = capture_stacks(processes) if node_id == here else _capture_on(node_id, processes)
        for rank, text in zip(ranks, found, strict=True):
            texts[rank] = text
    return texts


def _capture_on(node_id: str, processes: list[tuple[int, int, int]]) -> list[str]:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(capture_stacks).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        return list(ray.get(task.remote(processes), timeout=_CAPTURE_S))
    except RayError as error:
        return [f"no stacks: node {node_id} did not answer ({type(error).__name__})"] * len(processes)
