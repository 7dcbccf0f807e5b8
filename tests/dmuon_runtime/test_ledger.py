"""Where a launch is counted: once, whichever way it was made, and apart where it only compares."""

from __future__ import annotations

from dmuon_runtime.ledger import Ledger, NsCount

KEY = ("quack", "gram")


def _launch(ledger: Ledger) -> None:
    """By a call, and by the replay of a graph with two more."""
    ledger.count_launch(*KEY)
    ledger.add_launches({KEY: 2})


def test_launches_count_where_they_are_made() -> None:
    ledger = Ledger()
    _launch(ledger)
    assert ledger.snapshot() == {KEY: NsCount(launches=3)} and ledger.compared() == {}


def test_comparisons_count_apart_replays_too() -> None:
    ledger = Ledger()
    with ledger.comparing():
        _launch(ledger)
    assert ledger.snapshot() == {} and ledger.compared() == {KEY: 3}


def test_nothing_counts_while_muted_and_captures_count_when_they_run() -> None:
    ledger = Ledger()
    with ledger.muted():
        _launch(ledger)
    with ledger.recording() as launches, ledger.muted():
        ledger.count_launch(*KEY)
    assert launches == {KEY: 1} and ledger.snapshot() == {} and ledger.compared() == {}
