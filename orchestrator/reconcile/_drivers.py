"""Threads that drive jobs. They are daemons: a call that hangs does not keep the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["Drivers"]


class Drivers:
    """``number`` threads, started when they are first needed, that take work until :meth:`stop`."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._work: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do ``work`` in one of the threads; after :meth:`stop` it is cancelled instead."""
        if len(self._threads) < self._number:
            thread = threading.Thread(target=self._run, name=f"drive-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        future: Future[None] = Future()
        self._work.put((future, work))
        return future

    def stop(self) -> None:
        """Begin no other work; what is in progress is left alone."""
        self._stopped = True
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if self._stopped:
                future.cancel()
                continue
            future.set_running_or_notify_cancel()
            try:
                work()
            except BaseException as error:  # it is the caller's, who asks the future
                future.set_exception(error)
            else:
                future.set_result(None)
