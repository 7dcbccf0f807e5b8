"""What the client asks about kernels."""

from __future__ import annotations

from orchestrator import resources as r
from orchestrator._client_base import Caller

__all__ = ["KernelCalls"]


class KernelCalls(Caller):
    """The kernel part of :class:`~orchestrator.client.Client`."""

    def kernels(self) -> r.KernelList:
        """Return all kernels."""
        return self._ask(r.KernelList, "GET", "/v1/kernels", timeout_s=120.0)

    def breaker(self, kernel: str) -> r.BreakerResource:
        """Return the breaker of a kernel."""
        return self._ask(r.BreakerResource, "GET", f"/v1/kernels/{kernel}/breaker")

    def change_breaker(self, kernel: str, change: r.BreakerChange) -> r.BreakerResource:
        """Trip or reset the breaker of a kernel."""
        headers = {"Content-Type": "application/json"}
        path = f"/v1/kernels/{kernel}/breaker"
        return self._ask(r.BreakerResource, "PUT", path, content=change.model_dump_json(), headers=headers)

    def swap(self, job_id: str, request: r.SwapRequest, *, key: str | None = None) -> r.SwapResource:
        """Ask for a swap of a running job's kernel; with a key, asking again is safe."""
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Idempotency-Key": key})
        path = f"/v1/jobs/{job_id}/kernel-swaps"
        return self._ask(r.SwapResource, "POST", path, content=request.model_dump_json(), headers=headers)

    def swap_state(self, job_id: str, swap_id: str) -> r.SwapResource:
        """Return a swap."""
        return self._ask(r.SwapResource, "GET", f"/v1/jobs/{job_id}/kernel-swaps/{swap_id}")
