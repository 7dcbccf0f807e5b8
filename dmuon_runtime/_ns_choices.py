"""What was measured to be fastest, as a value that ranks can hand to each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Choices", "Form"]


@dataclass(frozen=True, slots=True)
class Form:
    """A class of matrices for which the form of the iteration is a question of speed."""

    kernel: str
    num_matrices: int
    short_dim: int
    long_dim: int
    dtype: str
    num_steps: int
    num_restarts: int

    def of(self, num_matrices: int) -> Form:
        """Return the same for another number of matrices."""
        return replace(self, num_matrices=num_matrices)

    @property
    def key(self) -> str:
        """Name of the class: the number of matrices counts by the next power of two."""
        bucket = 1 << (self.num_matrices - 1).bit_length()
        sizes = f"{bucket}/{self.short_dim}/{self.long_dim}"
        return f"form/{self.kernel}/{sizes}/{self.dtype}/{self.num_steps}-{self.num_restarts}"


@dataclass(frozen=True, slots=True)
class Choices:
    """Class to winner: tiles (``tile/...``) and forms (``form/...``). What is not in it follows the static rules.

    Bits of a result depend on it, so ranks that must agree bit for bit take over one rank's.
    """

    entries: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, str]:
        """Return a copy that ``json`` and ``pickle`` can carry."""
        return dict(self.entries)

    @classmethod
    def from_json(cls, entries: Mapping[str, str]) -> Choices:
        """Read what :meth:`to_json` gave.

        Raises:
            ValueError: it is no mapping of text to text.
        """
        if not isinstance(entries, Mapping) or not all(
            isinstance(text, str) for pair in entries.items() for text in pair
        ):
            raise ValueError(f"choices must map class names to winners, both text; found {entries!r}")
        return cls(dict(entries))
