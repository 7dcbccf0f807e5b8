"""What the client asks about the life of a job: ending it, stopping it for a while, and how its ranks get on."""

from __future__ import annotations

from orchestrator import resources as r
from orchestrator._client_base import Caller

__all__ = ["LifeCalls"]


class LifeCalls(Caller):
    """The part of :class:`~orchestrator.client.Client` that steers a job."""

    def cancel(self, job_id: str) -> r.JobResource:
        """Cancel a job."""
        return self._ask(r.JobResource, "POST", f"/v1/jobs/{job_id}:cancel")

    def pause(self, job_id: str) -> r.JobResource:
        """Pause a job."""
        return self._ask(r.JobResource, "POST", f"/v1/jobs/{job_id}:pause")

    def resume(self, job_id: str) -> r.JobResource:
        """Continue a paused job."""
        return self._ask(r.JobResource, "POST", f"/v1/jobs/{job_id}:resume")

    def ranks(self, job_id: str) -> r.RanksResource:
        """Return where each rank is, and which the others wait for."""
        return self._ask(r.RanksResource, "GET", f"/v1/jobs/{job_id}/ranks")
