"""Measured choices on disk: one JSON file a machine, shared by all processes of a user.

Writers merge under a lock file and replace the file whole, so that a reader sees an old or a new file and never half of
one. What cannot be read or belongs to another machine is ignored, and where nothing can be written choices live in this
process alone; each is logged once.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

from dmuon_runtime.kernels._settings import cache_directory

__all__ = ["ChoiceStore", "choice_store", "machine_of"]

_log = logging.getLogger(__name__)

FORMAT = 1
PACKAGES = ("triton", "quack-kernels", "nvidia-cutlass-dsl")
DRIVER_MODULE = Path("/proc/driver/nvidia/version")
CPU_FACTS = Path("/proc/cpuinfo")


def machine_of(device: torch.device) -> dict[str, str]:
    """Return all that a measured time depends on: chip, driver and versions (on a CPU its threads, too)."""
    if device.type == "cuda":
        chip, driver = torch.cuda.get_device_name(device), _driver_version()
    else:
        model = _first(r"model name\s*:\s*(.+)", CPU_FACTS)
        chip = f"{platform.machine()} {model} {torch.backends.cpu.get_cpu_capability()}"
        driver = f"{torch.get_num_threads()} threads"
    return {"chip": chip, "driver": driver, "torch": torch.__version__, **{name: _version(name) for name in PACKAGES}}


def _driver_version() -> str:
    """The driver's own release, and the CUDA that it serves; torch has no public word for either in all versions."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        failed = 1
    served = "unknown" if failed else str(version.value)
    release = _first(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER_MODULE)
    return f"{release}, CUDA {served}"


def _first(pattern: str, path: Path) -> str:
    """What the first match of ``pattern`` in a file of facts names, or ``unknown``."""
    try:
        found = re.search(pattern, path.read_text())
    except OSError:
        found = None
    return "unknown" if found is None else found[1]


def choice_store(device: torch.device) -> ChoiceStore:
    """Return the store of ``device``'s machine, one for this process."""
    return _store(cache_directory(), tuple(machine_of(device).items()))


@lru_cache(maxsize=16)
def _store(directory: Path, machine: tuple[tuple[str, str], ...]) -> ChoiceStore:
    return ChoiceStore(directory, dict(machine))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


class ChoiceStore:
    """Choices of one machine: ``load`` what is known, ``add`` what was measured."""

    def __init__(self, directory: Path, machine: Mapping[str, str]) -> None:
        self._machine = dict(machine)
        digest = hashlib.sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()[:16]
        self.path = directory / f"newton_schulz-{digest}.json"
        self._here: dict[str, str] = {}
        self._said: set[str] = set()

    def load(self) -> dict[str, str]:
        """Return all choices that are known now, those of other processes included."""
        return {**self._read(), **self._here}

    def add(self, choices: Mapping[str, str]) -> None:
        """Keep ``choices``; they replace those of the same classes."""
        self._here.update(choices)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                self._replace({**self._read(), **self._here})
        except OSError as error:
            self._say(f"measured choices are kept in this process alone: {self.path} cannot be written ({error})")

    def _replace(self, choices: Mapping[str, str]) -> None:
        document = {"format": FORMAT, "machine": self._machine, "choices": dict(sorted(choices.items()))}
        handle, partial = tempfile.mkstemp(prefix=self.path.stem, suffix=".partial", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(document, file, indent=1)
            os.replace(partial, self.path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise

    def _read(self) -> dict[str, str]:
        try:
            document = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._say(f"measured choices in {self.path} are ignored: {error}")
            return {}
        foreign = not isinstance(document, dict) or document.get("format") != FORMAT
        choices = None if foreign or document.get("machine") != self._machine else document.get("choices")
        if isinstance(choices, dict) and all(isinstance(value, str) for value in choices.values()):
            return {str(key): value for key, value in choices.items()}
        self._say(f"measured choices in {self.path} are ignored: not of this format and machine")
        return {}

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning("%s", message)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; on a file system without locks, go on: then one of two writers may lose what it added."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            _log.info("%s: this file system has no locks", path)
        yield
