"""Errors survive every boundary (case 9)."""

from __future__ import annotations

import pickle

from worker.contract.errors import ErrorValue, FieldError, PlanRefused, SpecInvalid
from worker.contract.messages import AttemptEnd, Entry, Milestone, RankError, RankReport
from worker.contract.states import IllegalTransition, JobState, Reason


class KeywordOnly(Exception):
    """Cannot be rebuilt from its args: pickling it fails."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_own_errors_survive_pickling() -> None:
    entry = FieldError(pointer="/a", code="x", message="found 1")
    for error in (SpecInvalid([entry]), PlanRefused([entry]), IllegalTransition(JobState.QUEUED, JobState.RUNNING)):
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error) and str(back) == str(error)


def test_foreign_error_becomes_a_value() -> None:
    try:
        raise KeywordOnly(code=7)
    except KeywordOnly as error:
        value = ErrorValue.from_exception(error, rank=3)
    assert value.type.endswith("KeywordOnly") and value.fields == {"code": "7"} and value.rank == 3
    assert "raise KeywordOnly" in value.traceback
    assert ErrorValue.model_validate_json(value.model_dump_json()) == value


def test_error_without_text() -> None:
    assert "Unprintable" in ErrorValue.from_exception(Unprintable()).message


def test_text_that_is_no_unicode_can_be_told() -> None:
    """A name of a file that is not UTF-8 in an exception's message: its rank has to tell it, and end as it should."""
    error = ValueError("no corpus in \udcff\N{SNOWMAN}")
    error.path = "\udcff"  # type: ignore[attr-defined]
    value = ErrorValue.from_exception(error, rank=0)
    milestone = Milestone(name="checkpoint_failed", at=1.0, message="\udcff", data={"path": "\udcff"})
    for body in (
        RankError(at=1.0, error=value),
        milestone,
        AttemptEnd(at=1.0, reason=Reason.INTERNAL, message="\udcff"),
    ):
        assert Entry.model_validate_json(Entry(seq=1, body=body).model_dump_json()).body == body
    assert value.message == "no corpus in \\udcff\N{SNOWMAN}"


def test_messages_keep_nan() -> None:
    milestone = Milestone(name="placed", at=1.0, message="m", data={"x": float("nan")})
    back = Entry.model_validate_json(Entry(seq=1, body=milestone).model_dump_json())
    assert isinstance(back.body, Milestone)
    report = RankReport(
        rank=0, step=1, at=0.0, loss=float("nan"), grad_norm=float("inf"), skipped=True, skipped_total=1,
        tokens_total=1, step_seconds=1.0, step_seconds_sum=1.0, step_seconds_buckets=(0,), comm=(), ns=(),
        owner_compute_seconds=0.0, ns_orthogonality_error=None, routes=(), kernel="cublas", kernel_epoch=0,
        memory_bytes=1, lr={},
    )  # fmt: skip
    again = RankReport.model_validate_json(report.model_dump_json())
    assert again.loss != again.loss and again.grad_norm == float("inf")
