"""Case 44. Symptom elsewhere: a scheduler rebuilt on resume lacks its base rates, or takes scheduled ones for them."""

from __future__ import annotations

from pathlib import Path

from tests.worker.alone import run_alone
from tests.worker.specs import tiny_spec

SCHEDULE = {"kind": "linear", "warmup_steps": 2, "final_ratio": 0.1}


def test_rates_after_a_resume_are_those_of_a_run_without_one(tmp_path: Path) -> None:
    spec = tiny_spec(training={"steps": 6, "global_batch": 12, "schedule": SCHEDULE})
    whole = run_alone(spec, tmp_path)
    first = run_alone(spec, tmp_path, stop_at=2, directory=tmp_path / "job")
    second = run_alone(spec, tmp_path, attempt=2, directory=tmp_path / "job")
    assert [report.step for report in second.reports] == [4, 5, 6]
    rates = [report.lr for report in first.reports + second.reports]
    assert rates == [report.lr for report in whole.reports]
    assert len({rate["muon"] for rate in rates}) == 6, "each step has a rate of its own"
