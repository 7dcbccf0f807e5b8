"""What checkpoints can refuse."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or must not be loaded; nothing was changed. Lists all that is wrong."""

    code = "checkpoint_refused"

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        self.message = message
        self.differences = tuple(differences)
        super().__init__(message, self.differences)

    def __str__(self) -> str:
        return "\n  ".join([self.message, *self.differences])
