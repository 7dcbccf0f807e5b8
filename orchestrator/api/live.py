"""The live page: a document, its scripts and a style sheet, served to anybody; what it asks for needs a token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from orchestrator.errors import NotFound

__all__ = ["FILES", "router"]

router = APIRouter(include_in_schema=False)
_ROOT = Path(__file__).parent.parent / "live"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
FILES = frozenset(
    str(path.relative_to(_ROOT)) for path in _ROOT.rglob("*") if path.suffix in _TYPES and path.name != "index.html"
)
"""What is served under ``/live``; nothing else can be asked for."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _read(name: str) -> bytes:
    return (_ROOT / name).read_bytes()


def _answer(name: str) -> Response:
    kind = f"{_TYPES[Path(name).suffix]}; charset=utf-8"
    return Response(_read(name), media_type=kind, headers=_HEADERS)


@router.get("/")
async def page() -> Response:
    """The page itself."""
    return _answer("index.html")


@router.get("/live/{name:path}")
async def part(request: Request, name: str) -> Response:
    """A script or a style sheet of the page."""
    if name not in FILES:
        raise NotFound(f"there is nothing at {request.url.path}")
    return _answer(name)
