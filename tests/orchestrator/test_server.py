"""The server as a process: how it ends, what a slow cluster does to it, clients that vanish."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from orchestrator.client import Client, StreamEnd
from orchestrator.server import allow_open_files
from tests.orchestrator.fakes import make_spec

pytestmark = pytest.mark.service


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    token: str

    def client(self) -> Client:
        return Client(self.url, self.token)


Start = Callable[[float], Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def run(delay_s: float) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [sys.executable, "-X", "dev", "-m", "tests.orchestrator.serve_fake", str(tmp_path), str(port)]
        process = subprocess.Popen([*words, str(delay_s)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"{url}/healthz", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        servers.append(Server(process, url, (tmp_path / "token").read_text().strip()))
        return servers[-1]

    yield run
    for server in servers:
        server.process.kill()
        server.process.wait()


def test_case_6_sigterm_with_a_hundred_open_streams(start: Start) -> None:
    server = start(0.0)
    with server.client() as client:
        job = client.submit(make_spec().model_dump_json())
        items: list[object] = []
        opened = threading.Event()

        def listen() -> None:
            for item in client.stream(job.id):
                items.append(item)
                opened.set()

        listener = threading.Thread(target=listen)
        listener.start()
        assert opened.wait(10)
        sockets = _open_sockets(server, job.id, 99)
        assert _open_streams(server) == 100
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        output, _ = server.process.communicate(timeout=10)
        assert time.monotonic() - began < 3
        listener.join(5)
        for one in sockets:
            with one:
                assert b"server_stopping" in _rest(one), "each was told, and closed"
    assert server.process.returncode == 0, output
    assert isinstance(items[-1], StreamEnd) and items[-1].reason == "server_stopping"
    assert "ended; launcher closed: True; heavy: []" in output
    assert "Traceback" not in output


def test_as_many_files_may_be_open_as_are_wanted(caplog: pytest.LogCaptureFixture) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        allow_open_files(before[1] - 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1] - 1, before[1]) and not caplog.text
        allow_open_files(before[1] + 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        assert f"only {before[1]} files may be open, {before[1] + 1} are wanted" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_case_52_a_slow_cluster_does_not_hold_up_the_server(start: Start) -> None:
    cluster_s = 5.0  # each call; who waits for one waits that long, who does not is far below half of it
    server = start(cluster_s)
    with server.client() as client:
        job = client.submit(make_spec().model_dump_json())
        times = []
        with httpx.Client(base_url=server.url, trust_env=False) as plain:
            until = time.monotonic() + 6
            while time.monotonic() < until:
                began = time.monotonic()
                assert plain.get("/healthz").status_code == 200
                times.append(time.monotonic() - began)
                time.sleep(0.05)
        assert max(times) < cluster_s / 2
        assert client.cancel(job.id).state in ("CANCELLED", "STOPPING")
    server.process.terminate()
    output, _ = server.process.communicate(timeout=10)
    slow = re.findall(r"Executing .* took ([\d.]+) seconds", output)  # what asyncio says of calls that block its loop
    assert not [text for text in slow if float(text) > cluster_s / 2], output
    assert server.process.returncode == 0


def test_case_53_clients_that_vanish_and_clients_that_dawdle(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMUON_REQUEST_TIMEOUT_S", "2")
    server = start(0.0)
    with server.client() as client:
        job = client.submit(make_spec().model_dump_json())
        sockets = _open_sockets(server, job.id, 100)
        assert _open_streams(server) == 100
        for one in sockets:
            one.close()
        deadline = time.monotonic() + 2
        while _open_streams(server) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _open_streams(server) == 0
        assert client.jobs().jobs
        port = int(server.url.rsplit(":", 1)[1])
        with _reading_nothing(port, b"/openapi.json") as one:
            _slow_clients(port, server.token)
            deadline = time.monotonic() + 10
            while _is_open(server, one):
                assert time.monotonic() < deadline, "who takes nothing of an answer holds its memory for ever"
                time.sleep(0.1)
    server.process.terminate()
    output, _ = server.process.communicate(timeout=10)
    assert "Traceback" not in output, "that a client leaves in the middle of its request is no failure of the service"


def _slow_clients(port: int, token: str) -> None:
    """One that never ends the head of its request is hung up on; one that never ends its body is told so."""
    rest = f"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n"
    bodies = [f"{what} {rest}Content-Length: 99\r\n\r\n{{".encode() for what in ("POST /v1/jobs", "PUT /v1/quotas/x")]
    with socket.create_connection(("127.0.0.1", port)) as leaving:
        leaving.sendall(bodies[0])
    with contextlib.ExitStack() as stack:
        slow = []
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost:", *bodies):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)))
            slow[-1].sendall(sent)
        answers = [one.recv(1000)[:12] for one in slow]
    assert answers == [b"", b"", b"HTTP/1.1 408", b"HTTP/1.1 408"]


def _reading_nothing(port: int, path: bytes) -> socket.socket:
    """Ask for more than the system's buffers hold, and take none of it."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(("127.0.0.1", port))
    one.sendall((b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n") * 500)
    return one


def _is_open(server: Server, client: socket.socket) -> bool:
    """True while the server holds the other end of a connection."""
    held = psutil.Process(server.process.pid).net_connections("tcp")
    return client.getsockname() in [entry.raddr for entry in held if entry.raddr]


def _open_sockets(server: Server, job_id: str, number: int) -> list[socket.socket]:
    """Open streams of a job's events; each has begun to answer."""
    request = (
        f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n"
        f"Authorization: Bearer {server.token}\r\n\r\n"
    ).encode()
    port = int(server.url.rsplit(":", 1)[1])
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    for one in sockets:
        one.sendall(request)
    for one in sockets:
        one.settimeout(10)
        assert one.recv(20).startswith(b"HTTP/1.1 200")
    return sockets


def _rest(one: socket.socket) -> bytes:
    """All that is still sent until the other side closes."""
    received = b""
    while chunk := one.recv(65536):
        received += chunk
    return received


def _open_streams(server: Server) -> int:
    answer = httpx.get(f"{server.url}/readyz", trust_env=False)
    return int(answer.json()["open_streams"])
