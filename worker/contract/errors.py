"""Errors that cross a process boundary, as values and as one small exception tree.

An exception of a worker is turned into an :class:`ErrorValue` where it is caught, because an arbitrary exception class
may not survive pickling. The classes here do: they carry their fields in ``args``.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

__all__ = ["ContractError", "ErrorValue", "FieldError", "PlanRefused", "SpecInvalid", "Words"]

MAX_TRACEBACK_CHARS = 16_000


def _writable(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


Words = Annotated[str, AfterValidator(_writable)]
"""Text of anybody's making that JSON must hold: halves of surrogate pairs (names of files have them) are escaped."""


class FieldError(BaseModel):
    """One thing that is wrong with a document: where, what was found, and what mends it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pointer: str
    """JSON pointer (RFC 6901) into the document, ``""`` for the whole of it."""
    code: str
    """Stable identifier of the kind of mistake, such as ``unknown_field``."""
    message: str
    """What was found and what was expected."""
    suggestion: str | None = None
    """What to write instead."""

    def __str__(self) -> str:
        text = f"{self.pointer or '/'}: {self.message}"
        if not self.suggestion:
            return text
        return f"{text}{'' if text.endswith(('.', '!', '?')) else '.'} {self.suggestion}"


class ErrorValue(BaseModel):
    """An exception as a value: it survives every boundary, whatever its class was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Words
    """Qualified class name, such as ``builtins.ValueError``."""
    message: Words
    rank: int | None = None
    """Global rank on which it was raised; None outside a worker."""
    traceback: Words = ""
    fields: dict[Words, Words] = {}
    """Attributes of the exception instance, as text."""

    @classmethod
    def from_exception(cls, error: BaseException, *, rank: int | None = None) -> ErrorValue:
        """Return ``error`` as a value; never raises, whatever the exception's own methods do."""
        kind = type(error)
        text = "".join(traceback.format_exception(error))
        return cls(
            type=f"{kind.__module__}.{kind.__qualname__}",
            message=_safe_str(error),
            rank=rank,
            traceback=text[-MAX_TRACEBACK_CHARS:],
            fields={name: _safe_str(value) for name, value in vars(error).items() if not name.startswith("_")},
        )

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.type}{where}: {self.message}"


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception as broken:  # a foreign __str__ may fail: its class is all that can be said
        return f"<{type(value).__qualname__} whose __str__ raised {type(broken).__qualname__}>"


class ContractError(ValueError):
    """A document that breaks the contract; carries every :class:`FieldError` found in it."""

    code = "invalid"

    def __init__(self, errors: Sequence[FieldError]) -> None:
        self.errors = tuple(errors)
        super().__init__(self.errors)

    def __str__(self) -> str:
        return "; ".join(str(error) for error in self.errors)


class SpecInvalid(ContractError):
    """The job spec itself is wrong: unknown fields, bad values, numbers that overflow."""

    code = "spec_invalid"


class PlanRefused(ContractError):
    """The spec is well formed, but no plan can be made of it: data, model or routing do not fit."""

    code = "plan_refused"
