"""From how each rank ended to why the attempt ended: pure, and free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from worker.contract.errors import ErrorValue
from worker.contract.messages import StopRequest
from worker.contract.states import Reason

__all__ = ["EndKind", "RankEnd", "decide_end", "is_root_cause"]


class EndKind(StrEnum):
    """How a rank ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"
    """It raised; the error is known."""
    LOST = "lost"
    """Its process is gone without a word."""


class RankEnd(BaseModel):
    """The end of one rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    kind: EndKind
    at: float
    set_up: bool = True
    """True when training had begun."""
    error: ErrorValue | None = None
    detail: str = ""
    """What is known of a lost process."""


_ECHOES = (
    "connection closed by peer", "connection reset", "connection refused", "broken pipe", "gloo/transport",
    "socket timeout", "nccl communicator was aborted", "remote process has exited", "did not join the process group",
    "failed to recv", "recvvalue failed", "sendbytes failed",
)  # fmt: skip
"""Texts of errors that a rank gets because another one is gone."""
_ECHO_TYPES = frozenset({"DistBackendError", "DistNetworkError", "PeerFailed"})
_REASON_OF_TYPE = {"NonFiniteGradient": Reason.NON_FINITE}
"""A refusal of the plan is not among them: an attempt has a plan, so what is refused on its ranks is their set-up."""


def is_root_cause(error: ErrorValue) -> bool:
    """Return False for an error that only says that another rank has gone."""
    if error.type.rpartition(".")[2] in _ECHO_TYPES:
        return False
    text = error.message.lower()
    return not any(echo in text for echo in _ECHOES)


def decide_end(ends: Sequence[RankEnd], world_size: int, stop: StopRequest | None) -> tuple[Reason, str]:
    """Return the reason of the attempt's end and what to tell people.

    A completed job is completed, whatever was asked in the meantime. Ends after a stop request are that stop's doing.
    Otherwise the first rank that failed by itself decides, then a process that vanished; errors that merely echo the
    loss of another rank count only where there is nothing else.
    """
    if len(ends) == world_size and all(end.kind == EndKind.COMPLETED for end in ends):
        return Reason.COMPLETED, f"all {world_size} ranks did all steps"
    if stop is not None:
        return stop.reason, stop.message
    ordered = sorted(ends, key=lambda end: end.at)
    failed = [end for end in ordered if end.kind == EndKind.FAILED and end.error is not None]
    causes = [end for end in failed if end.error is not None and is_root_cause(end.error)]
    lost = [end for end in ordered if end.kind == EndKind.LOST]
    if causes:
        return _reason_of(causes[0]), _grouped(causes)
    if lost:
        ranks = ", ".join(str(end.rank) for end in lost)
        return Reason.WORKER_LOST, f"the process of rank {ranks} is gone: {lost[0].detail}"
    if failed:
        reason = Reason.WORKER_LOST if failed[0].set_up else Reason.SETUP_FAILED
        return reason, _grouped(failed)
    kinds = ", ".join(f"rank {end.rank} {end.kind}" for end in ordered) or "no rank ended"
    return Reason.INTERNAL, f"the ranks ended in a way that has no name: {kinds}"


def _reason_of(end: RankEnd) -> Reason:
    assert end.error is not None, "only failures have a cause"
    known = _REASON_OF_TYPE.get(end.error.type.rpartition(".")[2])
    return known or (Reason.USER_ERROR if end.set_up else Reason.SETUP_FAILED)


def _grouped(ends: Sequence[RankEnd]) -> str:
    """Join errors of equal text, with the ranks that had them."""
    ranks: dict[str, list[int]] = {}
    for end in ends:
        if end.error is not None:
            ranks.setdefault(f"{end.error.type}: {end.error.message}", []).append(end.rank)
    return "; ".join(f"rank {', '.join(map(str, sorted(which)))}: {text}" for text, which in ranks.items())
