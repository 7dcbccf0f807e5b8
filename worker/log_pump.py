"""A process of its own that writes a rank's output to disk: it outlives the rank, so that last words are kept.

Run as a file, with the standard library alone: ``log_pump.py FOLDER RANK QUOTA STDOUT_FD STDERR_FD``. It leaves its
parent at once, reads both pipes until nobody holds them any more, and never lets the writer wait: what is above the
quota or cannot be written is dropped and counted. The end of the output is kept in any case.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections import deque

__all__ = ["TAIL_BYTES", "Keeper", "pump"]

TAIL_BYTES = 1 << 16
"""Of what is above the quota, the last so many bytes are kept."""
_READ_BYTES = 1 << 16
_COUNT_EVERY_S = 1.0


class Keeper:
    """Writes one stream to ``path``, up to ``quota_bytes``; the rest is counted in ``path + '.dropped'``."""

    def __init__(self, path: str, quota_bytes: int) -> None:
        self._path, self._quota_bytes = path, quota_bytes
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._left = quota_bytes - os.fstat(self._file).st_size
        self._tail: deque[bytes] = deque()
        self._tail_bytes = self._dropped = 0
        self._told_at = 0.0

    def take(self, data: bytes) -> None:
        """Keep ``data`` or count it."""
        kept = self._write(data[: max(0, self._left)])
        self._left -= kept
        rest = data[kept:]
        if not rest:
            return
        self._left = 0  # what follows a gap must not be taken for what follows the text before it
        self._dropped += len(rest)
        self._tail.append(rest)
        self._tail_bytes += len(rest)
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        if time.monotonic() - self._told_at > _COUNT_EVERY_S:
            self._tell()

    def close(self) -> None:
        """Write the end of what was dropped, with a line that says how much is missing before it."""
        tail = b"".join(self._tail)[-TAIL_BYTES:]
        missing = self._dropped - len(tail)
        if missing:
            text = f"\n[{missing} bytes are missing here: the quota of {self._quota_bytes} bytes was reached]\n"
            self._write(text.encode())
        if self._dropped:
            self._dropped -= self._write(tail)
            self._tell()
        os.close(self._file)

    def _write(self, data: bytes) -> int:
        done = 0
        with contextlib.suppress(OSError):  # the disk is full: the rank must not wait; what is missing is counted
            while done < len(data):
                done += os.write(self._file, data[done:])
        return done

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        draft = f"{self._path}.dropped.new"
        try:
            with open(draft, "w", encoding="ascii") as file:
                file.write(str(self._dropped))
            os.replace(draft, f"{self._path}.dropped")
        except OSError as error:
            print(f"{self._path}: {self._dropped} bytes dropped, which could not be noted: {error}", file=sys.stderr)


def pump(folder: str, rank: int, quota_bytes: int, pipes: dict[str, int]) -> None:
    """Read ``pipes`` (stream name to file descriptor) to their end."""
    keepers = {fd: Keeper(f"{folder}/{rank}.{name}", quota_bytes) for name, fd in pipes.items()}
    with selectors.DefaultSelector() as selector:
        for fd in keepers:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, _READ_BYTES)
                if data:
                    keepers[key.fd].take(data)
                else:
                    selector.unregister(key.fd)
                    keepers[key.fd].close()
    open(f"{folder}/{rank}.done", "w", encoding="ascii").close()


def _main() -> None:
    if os.fork():
        os._exit(0)  # an orphan: whoever ends the rank's children does not end this process
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends by itself when the rank has
    folder, rank, quota_bytes, stdout, stderr = sys.argv[1:]
    pump(folder, int(rank), int(quota_bytes), {"stdout": int(stdout), "stderr": int(stderr)})


if __name__ == "__main__":
    _main()
