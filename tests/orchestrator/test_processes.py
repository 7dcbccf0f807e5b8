"""Which processes are ours: never one whose id was reused, never one that began a session of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from orchestrator.processes import ProcessRecord, end_processes, helpers_of, session_processes

CODE = """
import subprocess, sys, time
wait = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
for apart in (False, True):
    child = subprocess.Popen(wait, start_new_session=apart, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_record_is_of_one_process_only(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    path = tmp_path / "record.json"
    record = ProcessRecord.of(child.pid, "somewhere")
    record.save(path)
    assert ProcessRecord.load(path) == record
    record.model_copy(update={"born_at": record.born_at - 10}).save(path)  # the id was another process's
    assert ProcessRecord.load(path) is None
    record.save(path)
    assert end_processes(psutil.Process(child.pid), (), patience_s=5.0) == []
    assert ProcessRecord.load(path) is None
    child.wait()


def test_what_began_a_session_of_its_own_is_left_alone() -> None:
    parent = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    helper, apart = int(parent.stdout.readline()), int(parent.stdout.readline())
    process = psutil.Process(parent.pid)
    assert [child.pid for child in helpers_of(process)] == [helper]
    assert [child.pid for child in session_processes(apart)] == [apart]
    assert end_processes(process, helpers_of(process), patience_s=1.0) == []
    assert psutil.pid_exists(apart) and not _runs(helper)
    assert end_processes(psutil.Process(apart), (), patience_s=5.0) == []
    parent.wait()
    parent.stdout.close()


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
