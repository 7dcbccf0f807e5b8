"""Why an attempt ended, from how its ranks did."""

from __future__ import annotations

import pytest

from worker.contract.errors import ErrorValue
from worker.contract.messages import StopRequest
from worker.contract.states import Reason
from worker.outcome import EndKind, RankEnd, decide_end

ECHO = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


def failed(
    rank: int, message: str, *, at: float = 0.0, kind: str = "builtins.ValueError", set_up: bool = True
) -> RankEnd:
    error = ErrorValue(type=kind, message=message, rank=rank)
    return RankEnd(rank=rank, kind=EndKind.FAILED, at=at, set_up=set_up, error=error)


def ended(rank: int, kind: EndKind, at: float = 0.0) -> RankEnd:
    return RankEnd(rank=rank, kind=kind, at=at, detail="exit code 1")


STOP = StopRequest(reason=Reason.CANCELLED, message="asked")


@pytest.mark.parametrize(
    ("ends", "stop", "reason"),
    [
        ([ended(0, EndKind.COMPLETED), ended(1, EndKind.COMPLETED)], None, Reason.COMPLETED),
        ([ended(0, EndKind.COMPLETED), ended(1, EndKind.COMPLETED)], STOP, Reason.COMPLETED),
        ([ended(0, EndKind.STOPPED)], STOP, Reason.CANCELLED),
        ([], STOP, Reason.CANCELLED),
        ([failed(0, ECHO, at=1), failed(1, "mine", at=2)], None, Reason.USER_ERROR),
        ([failed(0, ECHO, at=1), ended(1, EndKind.LOST, at=2)], None, Reason.WORKER_LOST),
        ([failed(0, ECHO)], None, Reason.WORKER_LOST),
        ([failed(0, "no module", set_up=False)], None, Reason.SETUP_FAILED),
        ([failed(0, "nan", kind="dmuon_runtime.errors.NonFiniteGradient")], None, Reason.NON_FINITE),
        ([failed(0, "bad", kind="worker.contract.errors.PlanRefused", set_up=False)], None, Reason.SETUP_FAILED),
        ([ended(0, EndKind.STOPPED), ended(1, EndKind.STOPPED)], None, Reason.INTERNAL),
    ],
)
def test_reasons(ends: list[RankEnd], stop: StopRequest | None, reason: Reason) -> None:
    assert decide_end(ends, 2, stop)[0] == reason


def test_equal_errors_are_told_once_with_their_ranks() -> None:
    message = decide_end([failed(1, "same"), failed(0, "same"), failed(2, "other")], 3, None)[1]
    assert message == "rank 0, 1: builtins.ValueError: same; rank 2: builtins.ValueError: other"
