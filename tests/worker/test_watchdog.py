"""Which rank is blamed for a stall, for how long each phase may last, and stacks of processes that do not get on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dmuon_runtime.progress import Progress
from worker.actors._stacks import capture_stacks
from worker.actors.watch import Watch
from worker.contract.failure import WatchdogSpec
from worker.watchdog import PHASES, Beat, Seen, Stall, decide_stall

QUICK = WatchdogSpec.model_validate({"silent_s": 5.0, **{f"{phase}_s": 10.0 for phase in PHASES}, "compile_s": 20.0})


def seen(
    phase: str, seconds: float, marks: int = 5, waiting: str = "", silent_s: float = 0.5, first: bool = False
) -> Seen:
    beat = Beat(
        phase=phase, phase_seconds=seconds, step=4, first_step=first, marks=marks, waiting=waiting,
        waiting_seconds=seconds if waiting else 0.0,
    )  # fmt: skip
    return Seen(beat, silent_s)


def stall(*ranks: Seen) -> Stall:
    found = decide_stall(dict(enumerate(ranks)), QUICK)
    assert found is not None
    return found


def test_every_phase_has_a_deadline() -> None:
    fields = {name for name in WatchdogSpec.model_fields if name not in ("action", "silent_s")}
    assert fields == {f"{phase}_s" for phase in PHASES}
    for phase in PHASES:
        limit = getattr(QUICK, f"{phase}_s")
        assert decide_stall({0: seen(phase, limit - 0.1)}, QUICK) is None
        assert f"/watchdog/{phase}_s {limit:g}" in stall(seen(phase, limit + 0.1)).message


def test_nothing_is_late_before_the_group_and_after_the_end() -> None:
    assert decide_stall({0: seen("joining", 1e6), 1: seen("done", 1e6)}, QUICK) is None
    assert decide_stall({}, QUICK) is None


def test_the_first_step_may_compile() -> None:
    assert decide_stall({0: seen("newton_schulz", 15.0, first=True)}, QUICK) is None
    assert "/watchdog/compile_s 20" in stall(seen("newton_schulz", 21.0, first=True)).message
    assert "/watchdog/set_up_s 10" in stall(seen("set_up", 11.0, first=True)).message


def test_the_rank_that_computes_is_blamed_not_those_that_wait_for_it() -> None:
    what = "reduce of muon on the shard axis"
    found = stall(seen("reduce", 11.0, 9, what), seen("forward", 10.5, 7), seen("reduce", 11.0, 9, what))
    assert (found.ranks, found.phase, found.collective) == ((1,), "forward", what)
    assert "rank 1 is in forward for 10.5 s at step 4" in found.message
    assert f"rank 0 waits for {what}" in found.message and f"rank 2 waits for {what}" in found.message


def test_among_those_that_wait_the_one_that_is_behind_is_blamed() -> None:
    found = stall(seen("forward", 11.0, 9, "forward of adamw"), seen("backward", 1.0, 8, "backward of muon"))
    assert (found.ranks, found.collective) == ((1,), "forward of adamw")
    both = stall(seen("reduce", 11.0, 9, "x"), seen("reduce", 11.0, 9, "x"))
    assert (both.ranks, both.collective) == ((0, 1), "x"), "nobody is behind: the wire is"


def test_silence_is_blamed_before_everything() -> None:
    found = stall(seen("forward", 1.0, 5), seen("reduce", 3.0, 9, "x", silent_s=5.1))
    assert found.ranks == (1,) and "rank 1 has answered nothing for 5.1 s (/watchdog/silent_s 5)" in found.message
    never = stall(Seen(None, 6.0), seen("forward", 1.0))
    assert never.ranks == (0,) and "silent since it began" in never.message


def test_progress_counts_phases_and_collectives_and_names_what_is_waited_for() -> None:
    progress = Progress()
    progress.enter("forward")
    assert progress.issued() == 2
    with progress.waiting("outer"):
        with pytest.raises(KeyError, match="inner"), progress.waiting("inner"):
            {}[progress.look().waiting]
        at = progress.look()
    assert (at.phase, at.marks, at.waiting) == ("forward", 2, "outer") and at.waiting_seconds >= 0
    assert progress.look().waiting == ""


_CHILD = """
import sys, time
from worker.actors._stacks import offer_stacks
print(offer_stacks(), flush=True)
def where_it_hangs():
    time.sleep(600)
where_it_hangs()
"""


def test_stacks_of_a_process_that_hangs_is_stopped_or_is_gone() -> None:
    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", _CHILD], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        descriptor = int(child.stdout.readline())
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        text = ""
        while "where_it_hangs" not in text:  # it may still be on its way there
            (text,) = capture_stacks([(child.pid, started, descriptor)])
            assert text.startswith(("Current thread", "Thread")), text
        (text,) = capture_stacks([(child.pid, started, descriptor)])
        assert text.count("where_it_hangs") == 1, "the last ones alone"
        assert child.poll() is None, "it goes on"
        assert capture_stacks([(child.pid, started + 1, descriptor)]) == ["the process is gone"], "an id used again"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert capture_stacks([(child.pid, started, descriptor)]) == ["no stacks: the process is stopped by a signal"]
    finally:
        child.kill()
        child.wait()
    assert capture_stacks([(child.pid, started, descriptor)]) == ["the process is gone"]


def test_a_watch_that_stood_still_blames_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a stopped process or a suspended machine: no rank was asked meanwhile."""
    now = [0.0]
    monkeypatch.setattr("worker.actors.watch.ray.wait", lambda references, timeout: ([], references))
    watch = Watch([SimpleNamespace(beat=SimpleNamespace(remote=object))] * 2, QUICK, lambda: now[0])
    assert watch.look({0, 1}) is None
    now[0] = 135.0
    assert watch.look({0, 1}) is None, "135 s in which nobody listened"
    now[0] += QUICK.silent_s
    found = watch.look({0, 1})
    assert found is not None
    assert "has answered nothing for 10.0 s" in found.message, "silence that was listened to counts"
