"""What can be done to a running service: each takes the scene and does it once."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from orchestrator.ray_process import live_ray
from orchestrator.settings import child_environment, ray_auth_environment
from tests.e2e.faults.scene import Scene
from tests.orchestrator.postgres import Postgres
from worker.contract.actors import rank_name

__all__ = [
    "control_plane_killed", "database_killed", "database_locked", "memory_exhausted", "ray_killed", "second_node",
    "supervisor_killed", "supervisor_stopped", "worker_exits", "worker_killed", "worker_raises", "worker_stopped",
]  # fmt: skip

_IN_WORKER = """
import sys
import ray
address, name, code = sys.argv[1:]
ray.init(address=address, namespace="dmuon", log_to_driver=False, logging_level="ERROR")
def act(actor):
    exec(code)
try:
    ray.get(ray.get_actor(name).__ray_call__.remote(act), timeout=10)
except ray.exceptions.RayError as error:
    print(type(error).__name__)
"""


_NODE = """
import ray._private.services as services
services.get_node_ip_address = lambda *_, **__: "127.0.0.1"
services.resolve_ip_for_localhost = lambda host: "127.0.0.1"
from ray.scripts.scripts import main
main()
"""
"""Ray would keep a second node off loopback, where the head is; a node alone on loopback it would refuse."""


def control_plane_killed(scene: Scene) -> None:
    """kill -9 of the server, which is then started again."""
    os.kill(scene.service.pid, signal.SIGKILL)
    scene.service.start()


def worker_killed(scene: Scene) -> None:
    """SIGKILL to the last rank's process."""
    _signal(scene, "RankActor", signal.SIGKILL)


def worker_stopped(scene: Scene) -> None:
    """SIGSTOP to the last rank's process: it lives and says nothing."""
    _signal(scene, "RankActor", signal.SIGSTOP)


def supervisor_killed(scene: Scene) -> None:
    """SIGKILL to the supervisor."""
    _signal(scene, "Supervisor", signal.SIGKILL)


def supervisor_stopped(scene: Scene) -> None:
    """SIGSTOP to the supervisor until it is known that nothing is known, then SIGCONT: it was alive all the while."""
    (process,) = scene.actors("Supervisor")
    process.suspend()
    try:
        scene.wait(lambda job: ("Reachable", "Unknown") in {(entry.type, entry.status) for entry in job.conditions})
    finally:
        process.resume()


def ray_killed(scene: Scene) -> None:
    """SIGKILL to Ray's head and its parts, all at once."""
    record = live_ray(scene.service.settings)
    assert record is not None
    for process in scene.session(record.pid):
        if process.name() in ("raylet", "gcs_server") or process.pid == record.pid:
            process.kill()


@contextmanager
def second_node(scene: Scene) -> Iterator[Callable[[], None]]:
    """A second node of one CPU on this machine; yields what kills it with everything on it."""
    record = live_ray(scene.service.settings)
    assert record is not None
    words = [sys.executable, "-c", _NODE, "start", f"--address={record.address}", "--num-cpus=1", "--block"]
    words += ["--node-ip-address=127.0.0.1", "--disable-usage-stats"]
    several = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    environment = child_environment(ray_auth_environment(scene.service.settings.ray_token_file) | several)
    with (scene.service.settings.state_dir / "second-node.log").open("ab") as log:
        node = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, env=environment)

    def kill() -> None:
        for process in [*scene.session(node.pid), psutil.Process(node.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait(10)

    try:
        yield kill
    finally:
        if node.poll() is None:
            kill()


def database_locked(scene: Scene, seconds: float = 4.0) -> None:
    """Somebody else holds the database so that nobody can write."""
    with sqlite3.connect(scene.service.settings.state_dir / "service.db", isolation_level=None, timeout=30) as other:
        other.execute("BEGIN EXCLUSIVE")
        time.sleep(seconds)  # the fault itself: the database is away for so long
        other.execute("ROLLBACK")
    other.close()


def database_killed(postgres: Postgres, scene: Scene, seconds: float = 4.0) -> None:
    """PostgreSQL is stopped as by ``pg_ctl stop -m immediate`` and, after a while, started again."""
    assert scene.job().state == "RUNNING"
    postgres.stop(immediately=True)
    time.sleep(seconds)  # the fault itself: the database is away for so long
    postgres.start()


def worker_exits(scene: Scene) -> None:
    """os._exit in the last rank."""
    _in_worker(scene, "import os; os._exit(3)")


def worker_raises(scene: Scene) -> None:
    """An exception in the thread that trains on the last rank."""
    _raise(scene, "ArithmeticError")


def memory_exhausted(scene: Scene) -> None:
    """What Python raises when there is no memory, in the same thread; the kernel's own way is :func:`worker_killed`."""
    _raise(scene, "MemoryError")


def _raise(scene: Scene, error: str) -> None:
    code = f"""
import ctypes, sys
for number, frame in sys._current_frames().items():
    while frame is not None:
        if frame.f_code.co_name == "train" and frame.f_code.co_filename.endswith("worker/train.py"):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(number), ctypes.py_object({error}))
        frame = frame.f_back
"""
    _in_worker(scene, code)


def _signal(scene: Scene, kind: str, number: signal.Signals) -> None:
    processes = scene.actors(kind)
    assert processes, f"no process of {kind} was found"
    processes[-1].send_signal(number)


def _in_worker(scene: Scene, code: str) -> None:
    record = live_ray(scene.service.settings)
    assert record is not None
    job = scene.job()
    name = rank_name(scene.job_id, len(job.attempts), job.spec.world_size - 1)
    environment = child_environment(ray_auth_environment(scene.service.settings.ray_token_file))
    words = [sys.executable, "-c", _IN_WORKER, record.address, name, code]
    subprocess.run(words, env=environment, check=True, timeout=60, capture_output=True)
