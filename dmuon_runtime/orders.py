"""In which order units are gathered and reduced: the plan's at first, then what the first step really did.

A module may be called in another order than it was registered in. Gathering follows an order strictly, so a wrong one
costs memory (units wait, materialised, for their turn), never correctness. After the first step all ranks take over the
record of one rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from dmuon_runtime.transport import Transport
from dmuon_runtime.unit import Unit

__all__ = ["Orders"]


class Orders:
    """The three orders, equal on all ranks, and this rank's record until one is adopted."""

    def __init__(self, units: Sequence[Unit], backward_order: Sequence[int]) -> None:
        self._units = tuple(units)
        self._adopted = False
        self.seen_forward: list[int] = []
        self.seen_backward: list[int] = []
        self.seen_done: list[int] = []
        plan_order = list(range(len(self._units)))
        self._set(plan_order, list(backward_order), plan_order[::-1])

    def _set(self, forward: Sequence[int], backward: Sequence[int], reduce: Sequence[int]) -> None:
        self.forward = [self._units[index] for index in forward]
        self.backward = [self._units[index] for index in backward]
        self.reduce = [self._units[index] for index in reduce]
        self.forward_place = {index: place for place, index in enumerate(forward)}
        self.backward_place = {index: place for place, index in enumerate(backward)}

    def adopt(self, transport: Transport) -> None:
        """Take over the fullest record, of the lowest such rank; collective the first time, then only forgets."""
        record = [_first_times(seen) for seen in (self.seen_forward, self.seen_backward, self.seen_done)]
        for seen in (self.seen_forward, self.seen_backward, self.seen_done):
            seen.clear()
        if self._adopted:
            return
        records: list[list[list[int]]] = [json.loads(text) for text in transport.gather_texts(json.dumps(record))]
        best = max(records, key=lambda entry: sum(len(order) for order in entry))  # the first of equals
        if not best[1]:
            return  # no rank had a backward yet
        self._adopted = True
        current = ([u.index for u in self.forward], [u.index for u in self.backward], [u.index for u in self.reduce])
        self._set(*(_complete(order, old) for order, old in zip(best, current, strict=True)))


def _first_times(seen: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(seen))


def _complete(order: Sequence[int], fallback: Sequence[int]) -> list[int]:
    """Return ``order`` with the units that it lacks at the end, as the fallback has them."""
    found = set(order)
    return [*order, *(index for index in fallback if index not in found)]
