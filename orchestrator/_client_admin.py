"""What the client asks on behalf of who runs the service."""

from __future__ import annotations

from orchestrator import resources as r
from orchestrator._client_base import Caller

__all__ = ["AdminCalls"]


class AdminCalls(Caller):
    """The part of :class:`~orchestrator.client.Client` about reasons, checkpoints, quotas, GPUs and the audit."""

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

    def gpus(self) -> r.GpuHolders:
        """Return who holds the GPUs of the cluster."""
        return self._ask(r.GpuHolders, "GET", "/v1/gpus")

    def audit(self, *, before: int | None = None, target: str | None = None) -> r.AuditPage:
        """Return who changed what, newest first."""
        params = {name: str(value) for name, value in {"before": before, "target": target}.items() if value is not None}
        return self._ask(r.AuditPage, "GET", "/v1/audit", params=params)
