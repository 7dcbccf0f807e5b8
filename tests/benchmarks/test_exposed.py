"""What is exposed of any contestant's communication: read from a trace small enough to work out by hand, and taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import _tracing
from benchmarks._exposed import NEWTON_SCHULZ, STEP, Exposed, most_exposed, read_exposed, read_newton_schulz
from benchmarks.contestants import Contestant
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.trace_events import kernel, launch, span

COLLECTIVE, COMPUTE, NCCL = "ncclDevKernel_Broadcast_RING_LL(x)", 7, 20


def events() -> list[dict[str, Any]]:
    """Two steps; microseconds. All that is exposed in the first is none of the second's."""
    found = [
        *(span(STEP + phase, begin, begin + 10) for phase, begin in (("forward", 0), ("backward", 10), ("update", 20))),
        *(span(STEP + phase, begin, begin + 10) for phase, begin in (("forward", 30), ("backward", 40))),
        span(STEP + "update", 250, 300),
        span("dmuon:muon/publish#0", 24, 26), span("dmuon:muon/forward#1", 30.5, 31.5),
        span("dmuon:muon/reduce#2", 47.5, 48.5), span("dmuon:control#3", 262.5, 263.25),
        span(NEWTON_SCHULZ, 263.5, 264.5),
    ]  # fmt: skip
    kernels = [
        ("gemm", COMPUTE, 5, 100, 110), (COLLECTIVE, NCCL, 6, 105, 130), ("gemm", COMPUTE, 15, 130, 140),
        # forward: compute waits for weights that were published in the first step, and then gathered
        (COLLECTIVE, NCCL, 25, 140, 160), (COLLECTIVE, NCCL, 31, 160, 175), ("gemm", COMPUTE, 33, 175, 200),
        # between two kernels lies a gap, and a collective that runs on is not what compute waits for
        ("ncclKernel_ReduceScatter", NCCL, 35, 195, 230), ("gemm", COMPUTE, 34, 202, 210),
        ("gemm", COMPUTE, 45, 231, 240),  # backward: and here it is
        # update: the host launches what comes behind at 260, and not before
        ("ncclSymDevKernel_AllGather", NCCL, 47, 241, 265), ("gemm", COMPUTE, 260, 270, 280),
        (COLLECTIVE, NCCL, 48, 280, 290), ("gemm", COMPUTE, 262, 291, 300),  # the last reduction, for which it waits
        ("copy", 8, 50, 285, 287),  # on another stream something is done
        (COLLECTIVE, NCCL, 263, 300, 303), ("gemm", COMPUTE, 264, 304, 310),  # a norm is summed
        (COLLECTIVE, NCCL, 49, 312, 318), ("Memcpy", COMPUTE, 265, 310, 320),  # who copies does not stand still
        ("gemm", COMPUTE, 266, 320, 321), (COLLECTIVE, NCCL, 46, 321, 331.5), ("gemm", COMPUTE, 267, 331, 332),
    ]  # fmt: skip
    for number, (name, stream, moment, begin, end) in enumerate(kernels):
        found += [launch(number, moment), kernel(name, stream, number, begin, end)]
    return found


HAND = Exposed(
    whole=0.081, forward=0.035, backward=0.020, update=0.026, passes=0.043, publish=0.020, communication=0.1035
)


def approximately(found: Exposed, factor: float = 1.0) -> bool:
    names = Exposed.__dataclass_fields__
    return all(getattr(found, name) == pytest.approx(getattr(HAND, name) * factor) for name in names)


def test_a_step_worked_out_by_hand() -> None:
    found = read_exposed({"traceEvents": events()})
    assert approximately(found), found
    assert found.forward + found.backward + found.update == pytest.approx(found.whole)


def test_it_is_the_mean_of_all_steps_but_the_first() -> None:
    more = {"traceEvents": [*events(), span(STEP + "forward", 400, 410)]}
    assert approximately(read_exposed(more), 1 / 2)
    assert read_newton_schulz(more) == pytest.approx(0.006 / 3), "of all three: the range has a kernel of 6 us"


def test_what_captured_graphs_run_counts_as_compute_wherever_it_runs() -> None:
    """Kernels of a graph may be shown on another stream than the one that launched it."""
    other = [event | {"args": event["args"] | {"stream": 9}} if event["ts"] == 304 else event for event in events()]
    assert read_exposed({"traceEvents": other}).whole == pytest.approx(HAND.whole)


def test_without_communication_nothing_is_exposed() -> None:
    alone = [event for event in events() if not str(event["name"]).startswith("nccl")]
    assert read_exposed({"traceEvents": alone}) == Exposed(*[0.0] * 7)
    assert read_newton_schulz({"traceEvents": [e for e in alone if e["name"] != NEWTON_SCHULZ]}) is None


@pytest.mark.parametrize("left_out", ["kernel", "user_annotation"])
def test_a_trace_that_shows_no_steps_is_refused(left_out: str) -> None:
    kept = [event for event in events() if event["cat"] not in (left_out, "gpu_memcpy")]
    with pytest.raises(ValueError, match="needs kernels and two steps, found"):
        read_exposed({"traceEvents": kept})


def test_every_figure_is_of_the_rank_in_which_it_is_largest() -> None:
    one, other = Exposed(3, 1, 2, 0, 3, 0, 9), Exposed(4, 4, 0, 0, 2, 2, 8)
    assert most_exposed([one, other]) == Exposed(4, 4, 2, 0, 3, 2, 9)


def test_ranges_of_a_real_step_and_nothing_of_them_behind(tmp_path: Path) -> None:
    model = WORKLOADS["tiny"].build(torch.device("cpu"))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    one, plain = Contestant(model, [torch.optim.Muon(matrices)]), _tracing._muon._zeropower_via_newtonschulz
    tokens = WORKLOADS["tiny"].tokens(0, 0, torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU]) as taken:
        with _tracing.steps_annotated(one):
            one.forward_backward(tokens)
            one.update()
        one.forward_backward(tokens)
        one.update()
    taken.export_chrome_trace(str(tmp_path / "trace.json"))
    seen = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [
        event["name"] for event in sorted(seen, key=lambda e: e.get("ts", 0)) if event.get("cat") == "user_annotation"
    ]
    assert [name for name in names if name.startswith(STEP)] == [
        f"{STEP}{p}" for p in ("forward", "backward", "update")
    ]
    assert names.count(NEWTON_SCHULZ) == len(matrices)
    assert _tracing._muon._zeropower_via_newtonschulz is plain


def test_the_most_exposed_rank_of_steps_that_are_traced_behind_one(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def taken(**_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            export_chrome_trace=lambda path: Path(path).write_text(json.dumps({"traceEvents": events()}))
        )

    def gather(everyone: list[Any], mine: tuple[Exposed, float | None]) -> None:
        everyone[:] = mine, (Exposed(1.0, *[0.0] * 6), 0.5)

    monkeypatch.setattr(_tracing, "profile", taken)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(_tracing.dist, "barrier", lambda: None)
    monkeypatch.setattr(_tracing.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(_tracing.dist, "all_gather_object", gather)
    steps: list[int] = []
    exposed, spent = _tracing.trace_steps(Contestant(torch.nn.Identity(), []), lambda: steps.append(1), 2)
    assert len(steps) == 3 and spent == 0.5
    assert exposed.whole == 1.0 and exposed.passes == pytest.approx(HAND.passes)
