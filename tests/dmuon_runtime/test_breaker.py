"""Laws of the breaker: what trips it, what it never does, and that everything ends."""

from __future__ import annotations

import itertools
import random

import pytest

from dmuon_runtime.breaker import (
    Breaker,
    BreakerKey,
    BreakerState,
    Cause,
    Move,
    Observation,
    Thresholds,
    decide_finding,
    size_class,
)
from worker.contract import kernels as contract
from worker.contract.spec import BreakerSpec

KEY = BreakerKey("blocked", 64, "float32")
GOOD = Observation(relative_error=0.0, orthogonality_excess=0.0, slow=False, compared=True)
BAD = Observation(exception="RuntimeError: boom")


def make(**thresholds: float) -> Breaker:
    return Breaker(KEY, Thresholds(**thresholds))  # type: ignore[arg-type]


def grant(breaker: Breaker, now: float) -> str:
    """What a process alone does: every wish is granted."""
    wish = breaker.wish(now)
    if wish is not None:
        breaker.move(wish[0], now, "" if wish[1] is None else wish[1].detail)
    return str(breaker.state)


def test_the_contract_has_the_same_states_and_defaults() -> None:
    assert {str(state) for state in BreakerState} == {str(state) for state in contract.BreakerState}
    assert Thresholds(**BreakerSpec().model_dump()) == Thresholds()


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (GOOD, None),
        (Observation(slow=True), None),
        (BAD, Cause.EXCEPTION),
        (Observation(non_finite=True), Cause.NON_FINITE),
        (Observation(relative_error=0.06), Cause.RELATIVE_ERROR),
        (Observation(relative_error=0.05), None),
        (Observation(relative_error=float("nan")), Cause.RELATIVE_ERROR),
        (Observation(orthogonality_excess=0.2), Cause.ORTHOGONALITY_ERROR),
        (Observation(orthogonality_excess=-0.2), None),
    ],
)
def test_one_call_by_itself(seen: Observation, cause: Cause | None) -> None:
    found = decide_finding(Thresholds(), seen)
    assert (None if found is None else found.cause) == cause


def test_a_slow_rate_needs_its_minimum_of_calls() -> None:
    breaker = make(window=4, minimum_calls=4, slow_rate=0.5)
    for slow in (True, True, True):
        assert breaker.observe(Observation(slow=slow)) is None
    found = breaker.observe(Observation(slow=False))
    assert found is not None and found.cause is Cause.SLOW and "3 of 4" in found.detail
    assert grant(breaker, 0.0) == "open"


def test_open_waits_tries_and_closes() -> None:
    breaker = make(open_s=60, half_open_calls=3, half_open_s=120)
    breaker.observe(BAD)
    assert grant(breaker, 10.0) == "open"
    assert grant(breaker, 69.9) == "open" and grant(breaker, 70.0) == "half_open"
    for _ in range(2):
        breaker.observe(GOOD)
        assert breaker.tries_next and grant(breaker, 71.0) == "half_open"
    breaker.observe(GOOD)
    assert not breaker.tries_next, "no more trials than allowed, even if nobody moves it"
    assert grant(breaker, 72.0) == "closed"


def test_a_trial_that_never_ends_is_ended() -> None:
    breaker = make(open_s=60, half_open_s=120)
    breaker.observe(BAD)
    grant(breaker, 0.0)
    assert grant(breaker, 60.0) == "half_open"
    assert grant(breaker, 179.9) == "half_open"
    wish = breaker.wish(180.0)
    assert wish is not None and wish[1] is not None and wish[1].cause is Cause.PROBE_TIMEOUT
    assert grant(breaker, 180.0) == "open"


def test_waits_double_up_to_a_bound_and_begin_anew_after_success() -> None:
    breaker, now, waits = make(open_s=60, max_open_s=200, half_open_calls=1), 0.0, []
    for _ in range(4):
        breaker.observe(BAD)
        assert grant(breaker, now) == "open"
        waits.append(breaker.open_for_s)
        now += breaker.open_for_s
        assert grant(breaker, now) == "half_open"
    assert waits == [60, 120, 200, 200]
    breaker.observe(GOOD)
    assert grant(breaker, now) == "closed"
    breaker.observe(BAD)
    grant(breaker, now)
    assert breaker.open_for_s == 60


@pytest.mark.parametrize(
    ("move", "state"),
    [(Move.FORCE_OPEN, "forced_open"), (Move.DISABLE, "disabled"), (Move.OBSERVE, "metrics_only")],
)
def test_what_an_operator_pins_stays(move: Move, state: str) -> None:
    breaker = make()
    breaker.move(move, 0.0, "a test")
    for now in (1.0, 1e6):
        breaker.observe(BAD)
        assert grant(breaker, now) == state
    assert breaker.failures == {Cause.EXCEPTION: 2}
    assert breaker.is_watched == (state == "metrics_only") and not breaker.tries_next
    for asked in (Move.TRIP, Move.PROBE, Move.CLOSE):
        assert breaker.move(asked, 1e6, "another rank's wish") is None and breaker.state == state
    breaker.move(Move.RESET, 2e6, "over")
    assert grant(breaker, 2e6) == "closed", "what was seen under the operator's word does not trip afterwards"


def test_a_random_life_has_only_moves_of_the_table_and_stays_bounded() -> None:
    dice = random.Random(7)
    for _ in range(200):
        breaker, now = make(open_s=5, max_open_s=40, half_open_s=20, half_open_calls=2, check_every_calls=3), 0.0
        entered: dict[str, float] = {}
        for _ in range(300):
            now += dice.random() * 3
            before = str(breaker.state)
            if not breaker.state.avoids_kernel or breaker.tries_next:
                breaker.observe(dice.choice((GOOD, GOOD, GOOD, BAD)))
            after = grant(breaker, now)
            if after != before:
                assert (before, after) in {
                    ("closed", "open"), ("open", "half_open"), ("half_open", "open"), ("half_open", "closed"),
                }  # fmt: skip
                entered[after] = now
            elif after == "open":
                assert now - entered["open"] < 40 + 3
            elif after == "half_open":
                assert now - entered["half_open"] < 20 + 3
            assert breaker.probes <= 2


def test_thresholds_out_of_range_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"relative_error.*open_s"):
        Thresholds(relative_error=-1.0, open_s=float("inf"), max_open_s=float("inf"))
    with pytest.raises(ValueError, match="minimum_calls"):
        Thresholds(window=2, minimum_calls=3)


def test_size_classes_are_powers_of_two() -> None:
    assert [size_class(n) for n in (1, 2, 3, 64, 65, 128)] == [1, 2, 4, 64, 128, 128]
    assert all(a <= b for a, b in itertools.pairwise(map(size_class, range(1, 300))))
