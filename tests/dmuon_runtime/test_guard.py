"""Guarded Newton-Schulz on one process: each way to fail trips, and no result that is applied is the failing call's."""

from __future__ import annotations

import pytest
import torch

from dmuon_runtime import ledger
from dmuon_runtime.breaker import BreakerKey, BreakerState, Cause, Move, Thresholds
from dmuon_runtime.guard import KernelGuard, compare
from dmuon_runtime.kernels import KERNELS, registered_kernel
from dmuon_runtime.newton_schulz import NewtonSchulz
from tests.faulty_kernel import Fault, Faulty

CPU = torch.device("cpu")
KEY = BreakerKey("faulty", 8, "float32")


def matrices(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def guarded(**thresholds: float) -> NewtonSchulz:
    found = NewtonSchulz("gram", "faulty")
    found.guard = KernelGuard(Thresholds(**thresholds))  # type: ignore[arg-type]
    return found


def counted(before: dict[tuple[str, str], ledger.NsCount], what: str) -> dict[str, int]:
    after = ledger.snapshot()
    found: dict[str, int] = {}
    for key, count in after.items():
        more = getattr(count, what) - getattr(before.get(key, ledger.NsCount()), what)
        if more:
            found[key[0]] = found.get(key[0], 0) + more
    return found


@pytest.mark.parametrize(
    ("fault", "amount", "cause"),
    [("raise", 0.0, Cause.EXCEPTION), ("nan", 0.0, Cause.NON_FINITE), ("wrong", 0.03, Cause.RELATIVE_ERROR)],
)
def test_a_failing_call_gives_the_result_of_the_fallback(fault: Fault, amount: float, cause: Cause) -> None:
    given = matrices((8, 16), (2, 8, 8), (12, 8))
    expected = NewtonSchulz("gram", "cublas").orthogonalize(given)
    with registered_kernel(Faulty(fault, amount=amount)):
        ns = guarded()
        before = ledger.snapshot()
        results = ns.orthogonalize(given)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        assert counted(before, "matrices") == {"cublas": 4}, "a result that was thrown away counts no matrix"
        assert counted(before, "launches")["faulty" if fault != "raise" else "cublas"] > 0, "but its launches ran"
        assert ns.guard is not None and ns.guard.failed and ns.guard.fallback_calls > 0
        assert ns.guard.findings[0][1].cause is cause
        wish = ns.guard.at(KEY).wish(0.0)
        assert wish is not None and wish[0] is Move.TRIP


def test_results_that_are_not_orthogonal_trip_where_their_difference_is_allowed() -> None:
    given = matrices((8, 16))
    expected = NewtonSchulz("gram", "cublas").orthogonalize(given)
    with registered_kernel(Faulty("wrong", amount=0.03)):
        ns = guarded(relative_error=10.0)
        results = ns.orthogonalize(given)
        assert ns.guard is not None and torch.equal(results[0], expected[0])
        finding = ns.guard.findings[0][1]
        assert finding.cause is Cause.ORTHOGONALITY_ERROR and "is above 0.1" in finding.detail
        assert guarded(relative_error=10.0, orthogonality_error=10.0).orthogonalize(given)[0].isfinite().all()


def test_a_slow_kernel_trips_by_its_rate_and_costs_no_result() -> None:
    given = matrices((8, 16))
    with registered_kernel(Faulty("slow", amount=0.002)):
        ns = guarded(check_every_calls=1, minimum_calls=3, window=4)
        assert ns.guard is not None
        for _ in range(3):
            assert ns.guard.at(KEY).wish(0.0) is None
            before = ledger.snapshot()
            ns.orthogonalize(given)
            assert counted(before, "matrices") == {"faulty": 1}
        assert not ns.guard.failed and ns.guard.fallback_calls == 0
        found = ns.guard.at(KEY).wish(0.0)
        assert found is not None and found[1] is not None and found[1].cause is Cause.SLOW


@pytest.mark.parametrize("is_compared", [False, True])
def test_bad_input_is_not_the_kernels_fault(is_compared: bool) -> None:
    bad = matrices((8, 16), (8, 16))
    bad[0][0, 0] = float("nan")
    with registered_kernel(Faulty("none")):
        ns = guarded(check_every_calls=1000, check_matrices=2)
        if not is_compared:  # the first call is, the next is not
            ns.orthogonalize(matrices((8, 16), (8, 16)))
        assert ns.guard is not None
        results = ns.orthogonalize(bad)
        assert results[0].isnan().all() and results[1].isfinite().all()
        assert not ns.guard.findings


class WrongForSide(Faulty):
    """Wrong by ``amount`` in products of one side alone, from the moment that :attr:`is_wrong` is set."""

    side, is_wrong = 0, False

    def _spoil(self, result: torch.Tensor, launch: int) -> torch.Tensor:
        wrong = self.is_wrong and result.shape[-1] == self.side
        return result * (1.0 + self.amount) if wrong else result


@pytest.mark.parametrize("side", [6, 8])
@pytest.mark.parametrize("good_calls", range(4))
def test_finite_wrong_results_are_found_out_within_the_bound_for_every_shape(side: int, good_calls: int) -> None:
    """Two groups share one breaker, whose calls alternate: with one count for both, one would never be compared."""
    given, kernel = matrices((6, 16), (8, 16), (8, 12)), WrongForSide("wrong", amount=0.01)
    kernel.side = side
    with registered_kernel(kernel):
        ns = guarded(check_every_calls=4)
        assert ns.guard is not None
        for _ in range(good_calls):
            ns.orthogonalize(given)
        assert not ns.guard.findings
        kernel.is_wrong, calls = True, 0
        while not ns.guard.findings:
            ns.orthogonalize(given)
            calls += 1
            assert calls <= 4, "the bound that is documented is kept"
        assert calls == -good_calls % 4 + 1, "and it is sharp: the first call is compared, and each fourth from it"
        key, finding = ns.guard.findings[0]
        assert key == KEY and finding.cause is Cause.RELATIVE_ERROR
        assert 0.05 < float(finding.detail.split()[1]) < 0.2, "an error of about a tenth"


def test_the_matrices_of_a_shape_take_turns_in_comparisons() -> None:
    """A kernel that is wrong for one of six matrices alone is found out when it is that one's turn."""
    given = [torch.full((2, 2, 3), 1.0), torch.full((2, 3), 2.0), torch.full((3, 2, 3), 3.0), torch.full((2, 4), 9.0)]
    for index, x in enumerate([given[0][0], given[0][1], given[1], *given[2]]):
        x += index / 10
    guard = KernelGuard(Thresholds(check_every_calls=2, check_matrices=2))
    breaker = guard.breaker("faulty", 2, torch.float32)
    due = [[float(x[0, 0, 0]) for x in guard._due(breaker, given)] for _ in range(8)]
    assert [len(numbers) for numbers in due] == [3, 0, 3, 0, 3, 0, 3, 0]
    assert due[0][-1] == due[2][-1] == 9.0, "each shape has a turn of its own"
    seen = [number for numbers in due[:6:2] for number in numbers[:-1]]
    assert seen == pytest.approx([1.0, 1.1, 2.2, 3.3, 3.4, 3.5]), "in three comparisons of two each was looked at"
    assert due[6] == due[0], "and then they begin anew"


def test_an_open_breaker_takes_its_class_alone_to_the_fallback_and_a_trial_applies_nothing() -> None:
    given = matrices((8, 16), (20, 40))
    with registered_kernel(Faulty("none")):
        ns = guarded(half_open_calls=2)
        assert ns.guard is not None
        ns.guard.at(KEY).move(Move.TRIP, 0.0, "a test")
        before = ledger.snapshot()
        ns.orthogonalize(given)
        assert counted(before, "matrices") == {"cublas": 1, "faulty": 1}
        assert dict(ns.expected([(8, 16), (20, 40)], torch.float32, CPU)) == {
            ("cublas", "gram"): 1, ("faulty", "gram"): 1,
        }  # fmt: skip
        ns.guard.at(KEY).move(Move.PROBE, 100.0, "due")
        before = ledger.snapshot()
        expected = NewtonSchulz("gram", "cublas").orthogonalize(given[:1])
        again, tried = ledger.snapshot(), ledger.LEDGER.compared().get(("faulty", "gram"), 0)
        results = ns.orthogonalize(given[:1])
        assert torch.equal(results[0], expected[0])
        assert set(counted(again, "matrices")) == set(counted(again, "launches")) == {"cublas"}
        assert ledger.LEDGER.compared()["faulty", "gram"] > tried, "the trial's launches are counted apart"
        ns.orthogonalize(given[:1])
        tried = ledger.LEDGER.compared()["faulty", "gram"]
        ns.orthogonalize(given[:1])
        assert ledger.LEDGER.compared()["faulty", "gram"] == tried, "no more trials than allowed"
        wish = ns.guard.at(KEY).wish(101.0)
        assert wish is not None and wish[0] is Move.CLOSE


def test_a_trial_that_fails_harms_no_step() -> None:
    given = matrices((8, 16))
    with registered_kernel(Faulty("raise")):
        ns = guarded()
        assert ns.guard is not None
        ns.guard.at(KEY).move(Move.TRIP, 0.0, "a test")
        ns.guard.at(KEY).move(Move.PROBE, 100.0, "due")
        ns.guard.begin()
        results = ns.orthogonalize(given)
        assert torch.equal(results[0], NewtonSchulz("gram", "cublas")(given[0])) and not ns.guard.failed
        wish = ns.guard.at(KEY).wish(101.0)
        assert wish is not None and wish[0] is Move.TRIP


def test_metrics_only_counts_and_protects_but_keeps_the_kernel() -> None:
    with registered_kernel(Faulty("nan")):
        ns = guarded()
        assert ns.guard is not None
        ns.guard.initial["faulty"] = BreakerState.METRICS_ONLY
        for _ in range(2):
            assert ns(matrices((8, 16))[0]).isfinite().all()
        breaker = ns.guard.at(KEY)
        assert breaker.failures == {Cause.NON_FINITE: 2} and breaker.wish(0.0) is None


def test_low_rank_noise_is_not_an_error() -> None:
    """Two roundings of a rank-one matrix differ wholly in the directions that it does not have."""
    torch.manual_seed(0)
    x = torch.outer(torch.randn(24), torch.randn(32))
    one, two = (NewtonSchulz("direct")((x + 1e-3 * torch.randn(24, 32)).to(torch.float32)) for _ in range(2))
    assert float((one - two).norm() / two.norm()) > 0.3, "unweighted, they are nothing like each other"
    assert float(compare([x], [one], [two])[0]) < 0.05


def test_one_dominant_direction_does_not_decide_alone() -> None:
    """Its error in 16 bits is large, and the rest of the result is right."""
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(32, 32)).Q, torch.linalg.qr(torch.randn(48, 32)).Q
    x = (u * torch.cat([torch.ones(1), torch.full((31,), 3e-2)])) @ v.mT
    right = u @ v.mT
    off = right + 0.1 * torch.outer(u[:, 1], v[:, 0])
    assert float(compare([x], [off], [right])[0]) < 0.03
    assert float(compare([x], [1.1 * right], [right])[0]) == pytest.approx(0.1, rel=1e-3), "wrong everywhere is wrong"
    assert compare([x], [right * torch.nan], [right]).isnan().all()


def test_half_precision_is_allowed_more() -> None:
    guard = KernelGuard(Thresholds(relative_error=0.02))
    for dtype, limit in ((torch.float32, 0.02), (torch.float64, 0.02), (torch.float16, 0.1), (torch.bfloat16, 0.1)):
        found = guard.breaker("faulty", 64, dtype).thresholds
        assert found.relative_error == pytest.approx(limit) and found.orthogonality_error == 0.1


def test_real_kernels_agree_within_the_default_thresholds() -> None:
    for shape in ((64, 96), (300, 280)):
        x = matrices(shape)
        expected = NewtonSchulz("gram", "cublas").orthogonalize(x)
        relative, excess = compare(x, NewtonSchulz("gram", "blocked").orthogonalize(x), expected).tolist()
        assert relative < 1e-4 and excess < 1e-4


def test_a_registered_kernel_leaves_with_its_test() -> None:
    with registered_kernel(Faulty("none", name="quack")):
        assert NewtonSchulz("gram", "quack").kernel_on(CPU) == "quack"
    assert type(KERNELS["quack"]).__name__ == "Quack" and "faulty" not in KERNELS
