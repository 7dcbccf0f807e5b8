"""The base of all documents."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Resource"]


class Resource(BaseModel):
    """Base: frozen; unknown fields are passed over, so that an old client survives a new server."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")
