"""The launcher that uses Ray, and the only module of this room that imports it.

It runs in a process of its own (``python -m orchestrator.launcher ADDRESS``, see
:mod:`orchestrator.launcher_process`), because Ray ends a process that is connected to it a minute after its head has
died, and sets signal handlers of its own. Every call has a time limit, since a head that is gone leaves calls hanging;
a call that runs into its limit says nothing about the attempt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from orchestrator.errors import LauncherUnavailable, StartFailed, SupervisorGone
from orchestrator.launcher_api import AttemptRef, Capacity, Resources
from orchestrator.launcher_process import serve_calls
from worker.contract.actors import GPU_ENTRY, NAMESPACE, PLAN_ENTRY, START_ENTRY, supervisor_name
from worker.contract.gpus import GpuLook
from worker.contract.kernels import KernelPolicy
from worker.contract.messages import AttemptStart, PollBatch, StopRequest

__all__ = ["RayLauncher"]

T = TypeVar("T")
_CALL_S, _LOOK_S, _START_S, _PLAN_S = 5.0, 15.0, 60.0, 300.0


class RayLauncher:
    """Speaks to the Ray at ``address``; the process's environment says how to prove who it is."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._connected = False
        self._entry: Any = None
        """A task that calls an entry point. One for all calls, since Ray keeps each that is made for good."""
        self._looking: dict[str, Any] = {}
        """Tasks that look at GPUs and have not ended, by node."""
        # Ray's own time limits do not cover everything that can hang, so each call runs in a thread that is waited for.
        self._threads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="ray-call")

    def capacity(self) -> Capacity:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        return self._bounded(self._capacity)

    def gpu_looks(self) -> tuple[GpuLook, ...]:
        """See :class:`~orchestrator.launcher_api.Launcher`. Each node is asked by a task that takes no resources."""
        return self._bounded(self._gpu_looks, _LOOK_S + _CALL_S)

    def start_attempt(self, start: AttemptStart) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`.

        Raises:
            StartFailed: the entry point raised.
            SupervisorGone: what it had started died at once, by no fault of its own.
        """
        self._bounded(lambda: self._run_entry(START_ENTRY, start.model_dump_json(), _START_S), _START_S + _CALL_S)

    def run_entry(self, request: str) -> str:
        """Plan on a machine of the cluster: hand ``request`` to the planner's entry point and return its answer."""
        return str(self._bounded(lambda: self._run_entry(PLAN_ENTRY, request, _PLAN_S), _PLAN_S + _CALL_S))

    def poll(self, ref: AttemptRef, cursor: int, limit: int) -> PollBatch:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        return PollBatch.model_validate_json(self._call(ref, "poll", cursor, limit))

    def set_kernels(self, ref: AttemptRef, policy: KernelPolicy) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        self._call(ref, "set_kernels", policy.model_dump_json())

    def stop(self, ref: AttemptRef, request: StopRequest) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        self._call(ref, "stop", request.model_dump_json())

    def leave(self, ref: AttemptRef) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        self._call(ref, "leave")

    def kill(self, ref: AttemptRef) -> None:
        """See :class:`~orchestrator.launcher_api.Launcher`. Ray ends its process even if that is stopped."""
        self._bounded(lambda: self._kill(supervisor_name(ref.job_id, ref.attempt)))

    def remains(self, ref: AttemptRef) -> tuple[str, ...]:
        """See :class:`~orchestrator.launcher_api.Launcher`."""
        return self._bounded(lambda: self._remains(ref.job_id))

    def close(self) -> None:
        """Disconnect; calls that hang are left behind."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._connected:
            self._ray().shutdown()

    # What follows runs in a thread of the pool.

    def _ray(self) -> Any:
        import ray

        return ray

    def _connect(self) -> Any:
        ray = self._ray()
        with self._lock:
            if not ray.is_initialized():
                ray.init(
                    address=self._address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level="WARNING",
                    configure_logging=False,
                )
                self._connected = True
            if self._entry is None:
                self._entry = ray.remote(num_cpus=0, max_retries=0)(_entry_caller())
        return ray

    def _bounded(self, call: Callable[[], T], timeout_s: float = 2 * _CALL_S) -> T:
        try:
            future: Future[T] = self._threads.submit(call)
            return future.result(timeout_s)
        except FutureTimeout:
            future.cancel()  # if it waits for a thread, it need not run any more
            raise LauncherUnavailable(f"Ray at {self._address} did not answer within {timeout_s:g} s") from None
        except (StartFailed, SupervisorGone, LauncherUnavailable):
            raise
        except Exception as error:
            raise LauncherUnavailable(
                f"Ray at {self._address} cannot be used: {type(error).__name__}: {error}"
            ) from None

    def _capacity(self) -> Capacity:
        ray = self._connect()
        nodes = tuple(_resources(node["Resources"]) for node in ray.nodes() if node["Alive"])
        return Capacity(nodes, _resources(ray.available_resources()))

    def _gpu_looks(self) -> tuple[GpuLook, ...]:
        ray = self._connect()
        # By address: of two Ray nodes of one machine, either sees its GPUs.
        nodes = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"] and _gpus_of(node)}
        # A driver that hangs may hold a process that nobody can end: such a node gets no second one with each look.
        hung = _unready(ray, self._looking, 0.0)
        asked = {address: hung.get(address) or self._ask_node(ray, node) for address, node in sorted(nodes.items())}
        self._looking = _unready(ray, hung | asked, _LOOK_S)
        return tuple(_heard(ray, address, reference) for address, reference in asked.items())

    def _ask_node(self, ray: Any, node: Mapping[str, Any]) -> Any:
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return self._entry.options(scheduling_strategy=here).remote(GPU_ENTRY, str(_gpus_of(node)))

    def _run_entry(self, entry: str, argument: str, timeout_s: float) -> Any:
        ray = self._connect()

        reference = self._entry.remote(entry, argument)
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            died = error.cause
            if isinstance(died, ray.exceptions.RayActorError) and not died.actor_init_failed:
                raise SupervisorGone(f"the process that {entry} had started is dead: {_short(died)}") from None
            raise StartFailed(f"{entry} failed in the cluster: {error}") from None
        except ray.exceptions.GetTimeoutError:
            ray.cancel(reference, force=True)  # or it might start an attempt that nobody waits for
            raise LauncherUnavailable(f"{entry} did not return within {timeout_s:g} s") from None

    def _call(self, ref: AttemptRef, method: str, *arguments: Any) -> str:
        return str(self._bounded(lambda: self._ask(ref, method, *arguments)))

    def _ask(self, ref: AttemptRef, method: str, *arguments: Any) -> Any:
        ray, name = self._connect(), supervisor_name(ref.job_id, ref.attempt)
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # Ray answered, and has no actor of this name
            raise SupervisorGone(f"Ray has no actor {name}") from None
        try:
            return ray.get(getattr(actor, method).remote(ref.fence, *arguments), timeout=_CALL_S)
        except ray.exceptions.ActorUnavailableError as error:
            raise LauncherUnavailable(f"{name} cannot be reached now: {error}") from None
        except ray.exceptions.RayActorError as error:
            if method == "leave":
                return None  # it left while it was asked
            raise SupervisorGone(f"{name} is dead: {error}") from None
        except ray.exceptions.GetTimeoutError:
            raise LauncherUnavailable(f"{name} did not answer {method} within {_CALL_S:g} s") from None

    def _kill(self, name: str) -> None:
        ray = self._connect()
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        except ValueError:
            raise SupervisorGone(f"Ray has no actor {name}") from None

    def _remains(self, job_id: str) -> tuple[str, ...]:
        util = self._connect().util
        named = util.list_named_actors(all_namespaces=True)
        actors = [f"actor {entry['name']}" for entry in named if job_id in entry["name"]]
        groups = [
            f"placement group {entry['name']}"
            for entry in util.placement_group_table().values()
            if job_id in entry["name"] and entry["state"] != "REMOVED"
        ]
        return (*actors, *groups)


def _entry_caller() -> Callable[[str, str], Any]:
    def call(address: str, text: str) -> Any:  # nested, so that it travels by value: the other side has no such module
        import importlib

        module, _, function = address.partition(":")
        return getattr(importlib.import_module(module), function)(text)

    return call


def _unready(ray: Any, references: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Wait for all; return those that have not ended."""
    waiting = list(references.values())
    left = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)[1] if waiting else []
    return {address: reference for address, reference in references.items() if reference in left}


def _heard(ray: Any, address: str, reference: Any) -> GpuLook:
    """Return what a node answered, or why it did not."""
    try:
        look = GpuLook.model_validate_json(ray.get(reference, timeout=0))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(reference, force=True)
        look = GpuLook(problem=f"it did not answer within {_LOOK_S:g} s")
    except ray.exceptions.RayTaskError as error:  # whose own text is a traceback
        look = GpuLook(problem=f"looking failed there: {type(error.cause).__name__}: {_short(error.cause)}")
    except (ray.exceptions.RayError, ValueError) as error:
        look = GpuLook(problem=f"it cannot be asked: {_short(error)}")
    return look.model_copy(update={"node": address})


def _gpus_of(node: Mapping[str, Any]) -> float:
    return float(node["Resources"].get("GPU", 0.0))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _resources(amounts: Mapping[str, float]) -> Resources:
    return Resources(amounts.get("CPU", 0.0), amounts.get("GPU", 0.0), amounts.get("memory", 0.0))


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes this process's input
    launcher = RayLauncher(sys.argv[1])
    serve_calls(launcher, sys.stdin, sys.stdout)
    launcher.close()
    os._exit(0)  # calls that hang must not hold up the end


if __name__ == "__main__":
    _main()
