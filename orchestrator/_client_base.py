"""What every part of the client builds on: asking the service one thing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel

__all__ = ["Caller"]

M = TypeVar("M", bound=BaseModel)


class Caller(ABC):
    """Something that can ask the service."""

    @abstractmethod
    def _ask(
        self,
        kind: type[M],
        method: str,
        path: str,
        *,
        content: str | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> M: ...
