"""The one tree of errors of the control plane, and how each looks over HTTP (RFC 9457).

Every class has a stable ``code``; HTTP status numbers are written here and nowhere else. Instances survive pickling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from worker.contract.errors import ContractError, FieldError

__all__ = [
    "PROBLEM_TYPE", "BadRequest", "BreakerAbsent", "ChildFailed", "ComparisonInvalid", "Conflict", "FollowTimeout",
    "Forbidden", "IdempotencyMismatch", "IdempotencyRunning", "InvalidInput", "InvalidPageToken", "JobFinished",
    "KernelsAbsent", "LauncherUnavailable", "LeaseLost", "MethodNotAllowed", "NotFound", "PlanMismatch",
    "PlanRefusedProblem", "PlannerFailed", "PreconditionFailed", "Problem", "QuotaExceeded", "RayProcessError",
    "RequestRefused", "RequestTimeout", "ServiceError", "ServiceUnreachable", "SettingsInvalid",
    "SpecInvalidProblem", "StaleWrite", "StartFailed", "StoreUnavailable", "StoreUnusable", "SupervisorGone",
    "SwapImpossible", "TooLarge", "TooManyStreams", "Unauthorized", "UnsupportedType", "as_service_error",
    "error_of_status", "field_errors_of",
]  # fmt: skip

PROBLEM_TYPE = "application/problem+json"


class ServiceError(Exception):
    """Base: what happened, which thing it happened to, and the cure, in ``detail``."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "The service failed"

    def __init__(self, detail: str, errors: Sequence[FieldError] = ()) -> None:
        self.detail, self.errors = detail, tuple(errors)
        super().__init__(detail, self.errors)

    def __str__(self) -> str:
        return "; ".join([self.detail, *map(str, self.errors)])


class SettingsInvalid(ServiceError, ValueError):
    """The service cannot be configured like this."""

    code, title = "settings_invalid", "The settings are wrong"


class StoreUnusable(ServiceError):
    """The database does not do what the store needs."""

    code, title = "store_unusable", "The database cannot be used"


class StoreUnavailable(ServiceError):
    """The database does not answer now; nothing was changed."""

    code, status, title = "store_unavailable", 503, "The database cannot be reached"


class StaleWrite(ServiceError):
    """A row changed since it was read: the write was not made."""

    code, status, title = "stale_write", 409, "Somebody else changed it first"


class LeaseLost(ServiceError):
    """Another control plane reconciles now."""

    code, status, title = "lease_lost", 409, "Another control plane holds the lease"


class LauncherUnavailable(ServiceError):
    """Ray cannot be reached, or did not answer in time. Says nothing about the jobs."""

    code, status, title = "launcher_unavailable", 503, "The cluster cannot be reached"


class SupervisorGone(ServiceError):
    """Positive evidence that an attempt's supervisor is dead or was never made."""

    code, title = "supervisor_gone", "The supervisor is gone"


class StartFailed(ServiceError):
    """The cluster was reached, and making the supervisor failed there."""

    code, title = "start_failed", "The attempt could not be started"


class TooManyStreams(ServiceError):
    """As many streams are open as are allowed."""

    code, status, title = "too_many_streams", 503, "Too many streams are open"


class PlannerFailed(ServiceError):
    """The planner died, did not answer in time, or failed by itself: not the user's fault."""

    code, status, title = "planner_failed", 503, "The planner failed"


class RayProcessError(ServiceError):
    """Ray's own process could not be started or ended."""

    code, title = "ray_process", "Ray's process failed"


class InvalidInput(ServiceError, ValueError):
    """A request or a document is wrong; ``errors`` says where."""

    code, status, title = "invalid_input", 422, "The request is wrong"


class ComparisonInvalid(InvalidInput):
    """What is to be compared is wrong, or cannot be compared."""

    code, title = "comparison_invalid", "The comparison cannot be run"


class SpecInvalidProblem(InvalidInput):
    """The job spec is wrong."""

    code, title = "spec_invalid", "The job spec is wrong"


class PlanRefusedProblem(InvalidInput):
    """No plan can be made of the job spec."""

    code, title = "plan_refused", "The job cannot be planned"


class PlanMismatch(ServiceError, ValueError):
    """The plan is not the one that the caller expected."""

    code, status, title = "plan_mismatch", 409, "The plan is another one"


class QuotaExceeded(ServiceError, ValueError):
    """The project has as much as it may."""

    code, status, title = "quota_exceeded", 429, "The project's quota is used up"


class InvalidPageToken(ServiceError, ValueError):
    """A page token that this service did not give out for this list."""

    code, status, title = "invalid_page_token", 400, "The page token is wrong"


class TooLarge(ServiceError, ValueError):
    """The body is larger than allowed."""

    code, status, title = "too_large", 413, "The request is too large"


class RequestTimeout(ServiceError):
    """The client took too long to send its request."""

    code, status, title = "request_timeout", 408, "The request came too slowly"


class UnsupportedType(ServiceError, ValueError):
    """The body is of a type that is not read here."""

    code, status, title = "unsupported_type", 415, "The content type is not read here"


class MethodNotAllowed(ServiceError):
    """The path has no such method."""

    code, status, title = "method_not_allowed", 405, "No such method here"


class BadRequest(ServiceError, ValueError):
    """The request cannot be read at all."""

    code, status, title = "bad_request", 400, "The request cannot be read"


class Unauthorized(ServiceError):
    """No token, or one that is not known."""

    code, status, title = "unauthorized", 401, "A bearer token is needed"


class Forbidden(ServiceError):
    """The token lacks a scope."""

    code, status, title = "forbidden", 403, "The token lacks a scope"


class NotFound(ServiceError, LookupError):
    """There is no such thing."""

    code, status, title = "not_found", 404, "Not found"


class Conflict(ServiceError, ValueError):
    """The thing is not in a state in which this can be done."""

    code, status, title = "conflict", 409, "Not possible now"


class JobFinished(Conflict):
    """The job has ended."""

    code, title = "job_finished", "The job has ended"


class BreakerAbsent(Conflict):
    """The kernel has no breaker."""

    code, title = "breaker_absent", "This kernel has no breaker"


class KernelsAbsent(Conflict):
    """The job launches none of our kernels: a word on them would change nothing."""

    code, title = "kernels_absent", "This job has no kernels to operate"


class SwapImpossible(Conflict):
    """A kernel swap cannot begin now."""

    code, title = "swap_impossible", "The kernel cannot be swapped now"


class PreconditionFailed(ServiceError, ValueError):
    """``If-Match`` names another version."""

    code, status, title = "precondition_failed", 412, "It was changed since"


class IdempotencyMismatch(ServiceError, ValueError):
    """The key was used with another request."""

    code, status, title = "idempotency_mismatch", 422, "The key belongs to another request"


class IdempotencyRunning(Conflict):
    """The first request with the key is not done."""

    code, title = "idempotency_running", "The first request still runs"


class Problem(BaseModel):
    """Body of an error answer (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    code: str
    errors: tuple[FieldError, ...] = ()

    @classmethod
    def of(cls, error: ServiceError, instance: str | None = None) -> Problem:
        """Return ``error`` as a body; ``instance`` is the path that was asked for."""
        return cls(
            type=f"urn:dmuon:problem:{error.code}",
            title=error.title,
            status=error.status,
            detail=error.detail,
            instance=instance,
            code=error.code,
            errors=error.errors,
        )


class RequestRefused(ServiceError):
    """The service answered a client with a problem."""

    code, title = "request_refused", "The service refused the request"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail, problem.errors)
        self.problem = problem
        self.args = (problem,)

    def __str__(self) -> str:
        lines = [f"{self.problem.title} ({self.problem.code}): {self.problem.detail}"]
        return "\n".join([*lines, *(f"  {error}" for error in self.problem.errors)])


class ChildFailed(ServiceError):
    """A child process died or was silent."""

    code, title = "child_failed", "A process of the service failed"


class FollowTimeout(ServiceError):
    """A job did not end while somebody waited for it."""

    code, title = "follow_timeout", "The job takes too long"


class ServiceUnreachable(ServiceError):
    """Nobody answers at the service's address."""

    code, title = "service_unreachable", "The service cannot be reached"


def as_service_error(error: ContractError) -> ServiceError:
    """Return an error of the contract as one of this tree."""
    kinds: dict[str, type[ServiceError]] = {"spec_invalid": SpecInvalidProblem, "plan_refused": PlanRefusedProblem}
    number = len(error.errors)
    detail = f"{number} thing{'s are' if number != 1 else ' is'} wrong: see errors"
    return kinds.get(error.code, InvalidInput)(detail, error.errors)


def error_of_status(status: int, detail: str) -> ServiceError:
    """Return an error that the framework raised by its status number as one of this tree."""
    kinds: tuple[type[ServiceError], ...] = (BadRequest, Unauthorized, Forbidden, NotFound, MethodNotAllowed, TooLarge)
    for kind in kinds:
        if kind.status == status:
            return kind(detail)
    return BadRequest(detail) if 400 <= status < 500 else ServiceError(detail)


def field_errors_of(entries: Sequence[Any]) -> tuple[FieldError, ...]:
    """Return pydantic's error entries as field errors, with what was found where that is a plain value.

    The pointer begins with where the value was looked for.
    """
    found = []
    for entry in entries:
        pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in entry["loc"])
        message, given = entry["msg"].removeprefix("Value error, "), entry.get("input")
        if isinstance(given, str | int | float):
            message += f", found {str(given)[:80]!r}" if isinstance(given, str) else f", found {given}"
        found.append(FieldError(pointer=pointer, code=entry["type"], message=message))
    return tuple(found)
