"""The control plane under load: a real server on loopback over SQLite with its real planner; its cluster has no room.

Who asks is a process of its own. Each row says how much of a core the server, its planner (which plans what was
submitted all the while) and who asks took. Latency counts from when a request was due, not from when it was sent, so
that a slow answer is not hidden by the wait for it. Goals: durable submit p99 < 50 ms at 100/s, GET p99 < 15 ms and a
page of the list p99 < 30 ms with 100 000 jobs, submit p99 < 100 ms beside 1000 followers, 2000 queued jobs decided in
< 2 s, and, with ``--ray``, the first step of a one-worker job within 8 s of its submission.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import insert, select

from benchmarks.common import print_table, write_result
from orchestrator.api.app import create_app
from orchestrator.launcher_api import Resources
from orchestrator.planner import ProcessPlanner
from orchestrator.reconcile.loop import Reconciler
from orchestrator.server import serve
from orchestrator.settings import Settings
from orchestrator.store.attempts import new_attempt
from orchestrator.store.database import Database
from orchestrator.store.jobs import submit_job
from orchestrator.store.models import Event, Job
from orchestrator.store.transitions import locked_job
from tests.e2e.jobs import small, submit, wait_until_ended
from tests.orchestrator.fakes import FakeClock, FakeLauncher, FakePlanner, make_spec
from worker.contract.load import load_spec
from worker.contract.logs import attempt_folder, log_file
from worker.contract.states import JobState

__all__ = ["main"]

SPEC = json.dumps(small()).encode()
GOALS_MS = {
    "submit at 100/s": 50.0,
    "get": 15.0,
    "list": 30.0,
    "list by project": 30.0,
    "submit beside followers": 100.0,
}
Ask = Callable[["Connection"], Awaitable[object]]


def fill(folder: Path, jobs: int) -> list[str]:
    """Store ``jobs`` that have ended, with five events each; return some of their ids."""
    database = Database(f"sqlite:///{folder / 'service.db'}")
    database.migrate()
    spec, now = load_spec(SPEC).model_dump_json(), time.time()
    for begin in range(0, jobs, 5000):
        rows = [
            {
                "id": f"{number:010x}", "name": f"n{number % 100}", "project": f"p{number % 20}", "spec": spec,
                "state": JobState.SUCCEEDED, "version": 5, "reason": "completed", "message": "", "field_errors": "[]",
                "created_at": now - 1e6, "state_since": now - 1e6, "finished_at": now - 1e6, "last_event": 5,
            }
            for number in range(begin, min(jobs, begin + 5000))
        ]  # fmt: skip
        events = [
            {"job_id": row["id"], "seq": seq, "at": 1.0, "kind": "state", "message": "x", "data": "{}"}
            for row in rows
            for seq in range(1, 6)
        ]
        with database.write() as session:
            session.execute(insert(Job), rows)
            session.execute(insert(Event), events)
    database.close()
    return [f"{number:010x}" for number in random.Random(0).sample(range(jobs), min(jobs, 500))]


class Connection:
    """One kept-alive HTTP connection, as thin as can be: the client shares the machine with the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, method: str, path: str, body: bytes = b"", accept: str = "*/*") -> bytes:
        """Ask and return the body of the answer; of a stream, return when it has begun."""
        if self._writer is None or self._reader is None or self._reader.at_eof():  # the server ends idle connections
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        assert self._reader is not None
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert lines[0].split()[1] in ("200", "201"), lines[0]
        length = next((line for line in lines if line.lower().startswith("content-length:")), None)
        return await self._reader.readexactly(int(length.split(":")[1])) if length else b""

    async def drain(self) -> int:
        """Read a stream until it is closed; return how many bytes came."""
        assert self._reader is not None
        found = 0
        while data := await self._reader.read(1 << 16):
            found += len(data)
        return found

    def close(self) -> None:
        """Hang up."""
        if self._writer is not None:
            self._writer.close()


async def at_rate(port: int, rate: float, seconds: float, ask: Ask) -> list[float]:
    """Ask ``rate`` times a second; return milliseconds from when each was due to its answer."""
    idle: list[Connection] = []
    begin = asyncio.get_running_loop().time() + 0.1

    async def one(due: float) -> float:
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        connection = idle.pop() if idle else Connection(port)
        await ask(connection)
        idle.append(connection)
        return (asyncio.get_running_loop().time() - due) * 1e3

    found = await asyncio.gather(*(one(begin + number / rate) for number in range(int(rate * seconds))))
    for connection in idle:
        connection.close()
    return list(found)


@contextmanager
def cores_taken(server: int, into: dict[str, float]) -> Iterator[None]:
    """Put into ``into`` how much of a core the server, its children and this process take meanwhile."""
    process = psutil.Process(server)

    def used() -> dict[str, float]:
        planner = sum(sum(child.cpu_times()[:2]) for child in process.children())
        return {"server": sum(process.cpu_times()[:2]), "planner": planner, "client": time.process_time()}

    before, begin = used(), time.monotonic()
    yield
    seconds = time.monotonic() - begin
    into |= {f"{name}_cores": (value - before[name]) / seconds for name, value in used().items()}


class Bench:
    """Takes the parts one after the other and keeps a row of each."""

    def __init__(self, server: int, port: int, folder: Path, seconds: float) -> None:
        self.server, self.port, self.folder, self.seconds = server, port, folder, seconds
        self.rows: list[dict[str, Any]] = []

    async def part(self, name: str, rate: float, ask: Ask) -> None:
        """Ask ``rate`` times a second and keep the figures, milliseconds."""
        taken: dict[str, float] = {}
        with cores_taken(self.server, taken):
            ordered = sorted(await at_rate(self.port, rate, self.seconds, ask))
        p99, goal = ordered[int(len(ordered) * 0.99)], GOALS_MS[name]
        figures = {"requests": len(ordered), "p50_ms": ordered[len(ordered) // 2], "p99_ms": p99, "max_ms": ordered[-1]}
        self.rows.append({"part": name, **figures, "goal_ms": goal, "met": p99 < goal, **taken})

    async def all(self, ids: Sequence[str], followers: int) -> None:
        """Take all parts."""
        picks, path = random.Random(1), "/v1/jobs?project=p7&state=SUCCEEDED"
        post: Ask = lambda connection: connection.send("POST", "/v1/jobs", SPEC)  # noqa: E731
        await post(Connection(self.port))
        await asyncio.sleep(8)  # the planner has imported torch, as that of a running service has
        await self.part("submit at 100/s", 100, post)
        await self.part("get", 50, lambda c: c.send("GET", f"/v1/jobs/{picks.choice(ids)}"))
        await self.part("list", 20, lambda c: c.send("GET", "/v1/jobs"))
        await self.part("list by project", 20, lambda c: c.send("GET", path))
        async with following(self.port, self.folder, followers):
            await self.part("submit beside followers", 20, post)


@asynccontextmanager
async def following(port: int, folder: Path, followers: int) -> AsyncIterator[None]:
    """Half of ``followers`` follow the events of jobs, and half a log that grows."""
    answers = [json.loads(await Connection(port).send("POST", "/v1/jobs", SPEC)) for _ in range(10)]
    live = [str(answer["id"]) for answer in answers]
    database = Database(f"sqlite:///{folder / 'service.db'}")
    for job_id in live:
        with database.write() as session:
            new_attempt(session, locked_job(session, job_id), now=time.time(), epoch=0)
    database.close()
    streams = [Connection(port) for _ in range(followers)]
    for number, stream in enumerate(streams):
        kind = "events" if number % 2 else "logs"
        await stream.send("GET", f"/v1/jobs/{live[number % len(live)]}/{kind}", accept="text/event-stream")
    drains = [asyncio.ensure_future(stream.drain()) for stream in streams]
    writing = asyncio.ensure_future(_write_logs(folder, live))
    await asyncio.sleep(3)  # all have what there was before they came
    yield
    writing.cancel()
    for stream in streams:
        stream.close()
    told = await asyncio.gather(*drains)
    assert not told or min(told[::2]) > 10_000, "every follower of a log was told of it"


async def _write_logs(folder: Path, live: Sequence[str]) -> None:
    paths = []
    for job_id in live:
        place = attempt_folder(folder / "logs" / job_id, 1)
        place.mkdir(parents=True, exist_ok=True)
        paths.append(log_file(place, 0, "stdout"))
    for number in range(10**9):
        for path in paths:
            with path.open("a") as file:
                file.write(f"step {number}: loss 2.5 and some more text that a training loop would print\n" * 10)
        await asyncio.sleep(0.1)


def decide_queue(folder: Path, jobs: int) -> float:
    """Return the seconds of the first pass over ``jobs`` that were queued: each gets its reason, written."""
    database, launcher = Database(f"sqlite:///{folder / 'queue.db'}"), FakeLauncher(cpus=64.0)
    database.migrate()
    launcher.free = Resources(0.0)
    with database.write() as session:
        for number in range(jobs):
            document = make_spec(name=f"n{number}", project=f"p{number % 20}", priority=number % 7)
            submit_job(session, document, now=1.0).state = JobState.QUEUED
    reconciler = Reconciler(database, launcher, FakePlanner(), FakeClock())
    begin = time.perf_counter()
    reconciler.run_once()
    seconds = time.perf_counter() - begin
    with database.read() as session:
        assert all(session.scalars(select(Job.message)).all()), "each has its reason"
    database.close()
    return seconds


def start_with_ray(folder: Path) -> dict[str, float]:
    """Return seconds from the submission of a one-worker job to what it went through."""
    from orchestrator.cli.own_service import OwnService

    (folder / "ray").mkdir()
    with OwnService(folder / "ray", num_cpus=2) as service, service.client() as client:
        for _ in range(2):  # the second finds Ray and the planner as a running service has them
            document = small(mesh={"shard": 1}, training={"steps": 3, "global_batch": 4})
            begin = time.time()
            job = wait_until_ended(client, submit(client, document).id, timeout_s=120)
            at = {event.kind: event.at - begin for event in reversed(client.events(job.id).events)}
            step = client.metrics(job.id).points[0].at - begin
        names = ("placed", "workers_started", "group_formed")
        return {**{name: at[name] for name in names if name in at}, "first step": step}


def _serve(folder: Path, port: int) -> None:
    launcher = FakeLauncher()
    launcher.free = Resources(0.0)  # nothing starts: what is measured is the control plane
    serve(create_app(Settings(state_dir=folder, port=port, auth=False), launcher, ProcessPlanner()), "127.0.0.1", port)


def _started(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [sys.executable, "-m", "benchmarks.control_plane", "--serve", str(folder), str(port)]
    log = (folder / "server.log").open("wb")
    server = subprocess.Popen(words, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server, port
        time.sleep(0.1)
    raise RuntimeError((folder / "server.log").read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts, print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--followers", type=int, default=1000)
    parser.add_argument("--ray", action="store_true", help="Also start a job on a real Ray.")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return _serve(Path(options.serve[0]), int(options.serve[1]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = fill(folder, options.jobs)
        server, port = _started(folder)
        try:
            bench = Bench(server.pid, port, folder, options.seconds)
            asyncio.run(bench.all(ids, options.followers))
        finally:
            server.terminate()
            server.wait(20)
        queue_s, rows = decide_queue(folder, 2000), bench.rows
        print_table(list(rows[0]), [list(found.values()) for found in rows])
        print(f"2000 queued jobs decided in {queue_s:.2f} s: {'met' if queue_s < 2 else 'MISSED'} (2 s)", flush=True)
        start_s: dict[str, Any] = start_with_ray(folder) if options.ray else {}
    for part, seconds in start_s.items():
        print(f"one-worker job, {part}: {seconds:.2f} s after its submission")
    write_result("control_plane", rows, queue_of_2000_s=queue_s, start_s=start_s, stored_jobs=options.jobs)


if __name__ == "__main__":
    main()
