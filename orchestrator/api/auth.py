"""Bearer tokens and scopes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request

from orchestrator.errors import Forbidden, SettingsInvalid, Unauthorized

__all__ = ["ADMIN", "SCOPES", "Authenticator", "Principal", "require"]

ADMIN = "admin"
SCOPES = frozenset({"jobs:read", "jobs:write", "kernels:operate", ADMIN})


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks, by a name that tells nothing of the token, and what they may do."""

    name: str
    scopes: frozenset[str]


class Authenticator:
    """Knows the tokens of a file: one a line, and after a blank its scopes; no scopes means all of them."""

    def __init__(self, principals: dict[str, Principal] | None) -> None:
        self._principals = principals

    @classmethod
    def open_to_all(cls) -> Authenticator:
        """Serve everybody."""
        return cls(None)

    @classmethod
    def from_file(cls, path: Path) -> Authenticator:
        """Read the tokens.

        Raises:
            SettingsInvalid: a scope that does not exist.
        """
        principals = {}
        for number, line in enumerate(path.read_text().splitlines(), 1):
            words = line.split()
            if not words:
                continue
            scopes = frozenset(words[1:]) or SCOPES
            if scopes - SCOPES:
                raise SettingsInvalid(f"{path}:{number} has scopes {sorted(scopes - SCOPES)}; known: {sorted(SCOPES)}")
            digest = hashlib.sha256(words[0].encode()).hexdigest()
            principals[words[0]] = Principal(f"token-{digest[:8]}", scopes)
        return cls(principals)

    def principal(self, header: str | None) -> Principal:
        """Return who sent an Authorization header.

        Raises:
            Unauthorized: nobody that is known.
        """
        if self._principals is None:
            return Principal("anybody", SCOPES)
        kind, _, token = (header or "").partition(" ")
        if kind.lower() == "bearer":
            found = None
            for known, principal in self._principals.items():  # all of them, so that the time tells nothing
                if hmac.compare_digest(known.encode(), token.strip().encode()):
                    found = principal
            if found is not None:
                return found
        raise Unauthorized("send 'Authorization: Bearer TOKEN' with a token of the service's token file")


def require(scope: str) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that lets through who has ``scope`` (or ``admin``)."""

    async def check(request: Request) -> Principal:
        authenticator: Authenticator = request.app.state.service.authenticator
        principal = authenticator.principal(request.headers.get("authorization"))
        request.state.principal = principal.name
        if not principal.scopes & {scope, ADMIN}:
            raise Forbidden(f"this needs scope {scope!r}; the token has {sorted(principal.scopes)}")
        return principal

    return check
