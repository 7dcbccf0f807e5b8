"""Run a spec on this machine without Ray and HTTP: one process a rank, reports over pipes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from worker.contract.errors import ErrorValue
from worker.contract.messages import Entry, Milestone, RankError, RankReport, StopRequest
from worker.contract.spec import JobSpec
from worker.contract.states import Reason
from worker.outcome import EndKind, RankEnd, decide_end

__all__ = ["Body", "LocalEnd", "run_local"]

Body = RankReport | Milestone | RankError
_GRACE_S = 2.0
"""After the first failure: time for the others to tell their own."""


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """How a local run ended."""

    reason: Reason
    message: str


def run_local(
    spec: JobSpec, on_entry: Callable[[Body], None], *, save: Path | None = None, plan_hash: str | None = None
) -> LocalEnd:
    """Run ``spec`` to its end; the failure of any rank ends all.

    The first Ctrl-C stops after the step in progress and the agreed one, the second at once.

    Args:
        on_entry: called here, in this thread, with everything that the ranks tell.
        save: where rank 0 writes the final weights, as ``torch.save`` of names and full tensors.
        plan_hash: the plan that the ranks must come to.
    """
    from worker.rendezvous import serve_store
    from worker.settings import read_settings

    store = serve_store("127.0.0.1", read_settings().join_timeout_s)
    gang = _Gang(spec, on_entry)
    try:
        gang.start(f"127.0.0.1:{store.port}", save, plan_hash)
        while gang.running and not gang.failed:
            gang.pump(1.0)
        deadline = time.monotonic() + _GRACE_S
        while gang.running and time.monotonic() < deadline:
            gang.pump(0.1)
    finally:
        gang.end()
    reason, message = decide_end(list(gang.ends.values()), spec.world_size, gang.stop_request)
    return LocalEnd(reason, message)


@dataclass(slots=True)
class _Gang:
    spec: JobSpec
    on_entry: Callable[[Body], None]
    processes: dict[int, ForkServerProcess] = field(default_factory=dict)
    pipes: dict[int, Connection] = field(default_factory=dict)
    ends: dict[int, RankEnd] = field(default_factory=dict)
    stop_request: StopRequest | None = None

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in self.processes if rank not in self.ends]

    @property
    def failed(self) -> bool:
        """True when a rank ended in another way than by completing or stopping."""
        return any(end.kind in (EndKind.FAILED, EndKind.LOST) for end in self.ends.values())

    def start(self, address: str, save: Path | None, plan_hash: str | None) -> None:
        """Start one process a rank, each a fork of one that has imported everything: N ranks import once."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_preloaded(self.spec))
        for rank in range(self.spec.world_size):
            ours, theirs = context.Pipe()
            arguments = (self.spec.model_dump_json(), rank, address, theirs, save, plan_hash)
            process = context.Process(target=_rank_main, args=arguments, name=f"rank-{rank}", daemon=True)
            with _deaf_to_the_keyboard():
                process.start()
            theirs.close()
            self.processes[rank], self.pipes[rank] = process, ours

    def pump(self, timeout_s: float) -> None:
        """Take what the ranks have sent, waiting up to ``timeout_s`` for something."""
        try:
            open_pipes = {self.pipes[rank]: rank for rank in self.running}
            for pipe in wait(list(open_pipes), timeout_s):
                if isinstance(pipe, Connection):
                    self._receive(open_pipes[pipe], pipe)
        except KeyboardInterrupt:
            if self.stop_request is not None:
                raise
            self.stop_request = StopRequest(reason=Reason.CANCELLED, message="interrupted from the keyboard")
            with contextlib.suppress(OSError):
                self.pipes[0].send_bytes(b"stop")

    def _receive(self, rank: int, pipe: Connection) -> None:
        try:
            raw = pipe.recv_bytes()
        except (EOFError, OSError):
            self.processes[rank].join(5)
            detail = f"exit code {self.processes[rank].exitcode}"
            self.ends[rank] = RankEnd(rank=rank, kind=EndKind.LOST, at=time.time(), detail=detail)
            return
        if raw.startswith(b"end"):
            self.ends[rank] = RankEnd.model_validate_json(raw[3:])
            return
        body = Entry.model_validate_json(raw).body
        assert body.kind != "end", "only a supervisor says that an attempt ended"
        self.on_entry(body)

    def end(self) -> None:
        """Leave no process behind."""
        finished = [self.processes[rank] for rank in self.ends]
        _join(finished, 5.0)
        alive = [process for process in self.processes.values() if process.is_alive()]
        for process in alive:
            process.terminate()
        _join(alive, 2.0)
        for process in alive:
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def _deaf_to_the_keyboard() -> Iterator[None]:
    """Let what is started in here ignore Ctrl-C from its first moment: the parent decides, and imports take long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _preloaded(spec: JobSpec) -> list[str]:
    """Modules for a server of forks; what cannot be imported is left to the rank, which tells the error."""
    kind = spec.model.type
    return ["worker.train", *([] if kind is None else [f"transformers.models.{kind}.modeling_{kind}"])]


def _join(processes: Iterable[ForkServerProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _rank_main(
    spec_json: str, rank: int, address: str, pipe: Connection, save: Path | None, plan_hash: str | None
) -> None:
    """Body of a rank's process: everything it has to say goes through ``pipe``, its end last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    lock = threading.Lock()

    def send(body: Body) -> None:
        with lock:
            pipe.send_bytes(Entry(seq=0, body=body).model_dump_json().encode())

    end = _train(spec_json, rank, address, pipe, send, save, plan_hash)
    with lock:
        pipe.send_bytes(b"end" + end.model_dump_json().encode())
    pipe.close()


def _train(
    spec_json: str,
    rank: int,
    address: str,
    pipe: Connection,
    send: Callable[[Body], None],
    save: Path | None,
    plan_hash: str | None,
) -> RankEnd:
    phase, seat = "joining", None
    try:
        from worker import train
        from worker.control import Mailbox
        from worker.device import decide_device, limit_threads
        from worker.rendezvous import connect_store
        from worker.settings import read_settings

        spec, settings, mailbox = JobSpec.model_validate_json(spec_json), read_settings(), Mailbox()
        threading.Thread(target=_obey, args=(pipe, mailbox.stop), daemon=True).start()
        limit_threads(spec)
        store = connect_store(address, settings.join_timeout_s)
        seat = train.Rank(
            spec, rank, decide_device(spec, rank), store, settings, mailbox, send, plan_hash=plan_hash, save=save
        )
        try:
            outcome = train.train(seat)
        finally:
            phase = seat.phase.value
        return RankEnd(rank=rank, kind=EndKind(outcome.value), at=time.time())
    except Exception as error:  # whatever it is, the parent must hear of it
        value = ErrorValue.from_exception(error, rank=rank)
        with contextlib.suppress(OSError):
            if seat is None or seat.told is not error:
                send(RankError(at=time.time(), error=value))
        return RankEnd(rank=rank, kind=EndKind.FAILED, at=time.time(), set_up=phase == "done", error=value)


def _obey(pipe: Connection, stop: Callable[[], None]) -> None:
    """Wait for the parent's word; without a parent there is nobody to train for."""
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    stop()
