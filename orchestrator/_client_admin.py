"""What the client asks on behalf of who runs the service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel

from orchestrator import resources as r

__all__ = ["AdminCalls"]

M = TypeVar("M", bound=BaseModel)


class AdminCalls(ABC):
    """The part of :class:`~orchestrator.client.Client` about reasons, checkpoints, quotas and the audit."""

    def explain(self, job_id: str) -> r.Explanation:
        """Return why a job is where it is."""
        return self._ask(r.Explanation, "GET", f"/v1/jobs/{job_id}:explain")

    def checkpoints(self, job_id: str) -> r.CheckpointList:
        """Return what a job has saved."""
        return self._ask(r.CheckpointList, "GET", f"/v1/jobs/{job_id}/checkpoints")

    def quotas(self) -> r.QuotaList:
        """Return what projects may use, and what they use."""
        return self._ask(r.QuotaList, "GET", "/v1/quotas")

    def set_quota(self, project: str, change: r.QuotaChange) -> r.QuotaResource:
        """Set what a project may use at once."""
        headers = {"Content-Type": "application/json"}
        path = f"/v1/quotas/{project}"
        return self._ask(r.QuotaResource, "PUT", path, content=change.model_dump_json(), headers=headers)

    def audit(self, *, before: int | None = None, target: str | None = None) -> r.AuditPage:
        """Return who changed what, newest first."""
        params = {name: str(value) for name, value in {"before": before, "target": target}.items() if value is not None}
        return self._ask(r.AuditPage, "GET", "/v1/audit", params=params)

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
