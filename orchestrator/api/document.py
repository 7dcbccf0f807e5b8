"""What the OpenAPI document says beyond the routes: every answer that is no success is a problem (RFC 9457)."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from orchestrator.errors import PROBLEM_TYPE, Problem

__all__ = ["PROBLEM_ANSWERS", "document_of", "text_answer"]

_REF = "#/components/schemas/{model}"
PROBLEM_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "A problem (RFC 9457); its code says which",
        "content": {PROBLEM_TYPE: {"schema": {"$ref": _REF.format(model="Problem")}}},
    }
}


def text_answer(kind: str) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of an answer of another content type than JSON."""
    return {200: {"content": {kind: {"schema": {"type": "string"}}}}}


def document_of(app: FastAPI) -> dict[str, Any]:
    """Return the document of ``app``, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema = Problem.model_json_schema(ref_template=_REF)
        parts = document.setdefault("components", {}).setdefault("schemas", {})
        parts |= {name: part for name, part in schema.pop("$defs", {}).items() if name not in parts}
        parts["Problem"] = schema
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            if path.startswith("/v1/"):
                for operation in methods.values():
                    operation["security"] = [{"token": []}]
        app.openapi_schema = document
    return app.openapi_schema
