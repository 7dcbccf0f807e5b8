"""A real GPU: a child that takes memory of it is somebody's or nobody's, and is gone when it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pynvml
import pytest
import torch

from orchestrator.gpus import Standing, standing_of
from orchestrator.settings import child_environment
from tests.architecture.source import ROOT
from worker.contract.gpus import GpuLook, GpuProcess, attempt_mark
from worker.gpus import look_at_gpus
from worker.settings import ATTEMPT_VARIABLE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HOLDS = "import torch; x = torch.ones(256 << 20, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()"
PLANS = """
from tests.worker.specs import tiny_spec
from worker.contract.planning import PlanAnswer, PlanRequest
from worker.planner import answer
spec = tiny_spec(1, resources={"gpus_per_worker": 1}).model_dump_json()
for request in (PlanRequest(), PlanRequest(spec_json=spec)):
    assert PlanAnswer.model_validate_json(answer(request.model_dump_json())).failure is None
"""
MARK = attempt_mark("a-job", 1)


@contextmanager
def running(code: str, mark: str = "") -> Iterator[int]:
    """A child that has run ``code`` and waits; its id."""
    code += "\nprint('done', flush=True); input()"
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment = child_environment(places | ({ATTEMPT_VARIABLE: mark} if mark else {}))
    words = [sys.executable, "-c", code]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as child:
        assert child.stdout is not None
        assert any(line == "done\n" for line in child.stdout), "the child has failed"
        try:
            yield child.pid
        finally:
            child.kill()


def look() -> GpuLook:
    """All GPUs of this machine, whatever this process was restricted to."""
    pynvml.nvmlInit()
    number = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    found = look_at_gpus(number)
    assert found.problem == "" and len(found.gpus) == number, found
    return GpuLook.model_validate_json(found.model_dump_json())


def until(pids: set[int], expected: set[int]) -> dict[int, GpuProcess]:
    """Look until those of ``pids`` that are seen are ``expected``; the driver may take a moment."""
    deadline = time.monotonic() + 10
    while True:
        seen = {process.pid: process for process in look().processes if process.pid in pids and process.found}
        if seen.keys() == expected or time.monotonic() > deadline:
            return seen
        time.sleep(0.2)


def skip_where_none_is_named(seen: dict[int, GpuProcess]) -> None:
    if not seen:
        assert any(not process.found for process in look().processes), "held, listed for nobody, and yet not unknown"
        pytest.skip("this machine's driver names no process that can be seen from here: told as unknown")


def test_a_process_on_a_gpu_is_its_attempts_or_nobodys_until_it_ends() -> None:
    with running(HOLDS) as stranger, running(HOLDS, MARK) as own:
        pids = {stranger, own}
        seen = until(pids, pids)
        skip_where_none_is_named(seen)
        assert seen.keys() == pids
        assert standing_of(seen[stranger], frozenset({MARK})) is Standing.STRAY
        assert standing_of(seen[own], frozenset({MARK})) is Standing.LIVE
        assert standing_of(seen[own], frozenset()) is Standing.STRAY, "its attempt has ended"
        assert "torch.ones" in seen[stranger].command
        assert all(process.bytes is None or process.bytes >= 256 << 20 for process in seen.values())
    assert until(pids, set()) == {}


def test_a_planner_takes_no_gpu() -> None:
    """It belongs to no attempt: one that held a GPU would be nobody's."""
    with running(HOLDS) as holder, running(PLANS) as planner:
        skip_where_none_is_named(until({holder}, {holder}))
        assert until({holder, planner}, {holder}).keys() == {holder}
