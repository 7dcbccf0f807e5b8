"""What scripts name is there: nobody notices on a machine without a GPU that a test has another name now."""

from __future__ import annotations

import re

from tests.architecture.source import ROOT


def test_what_the_script_for_gpus_names_exists() -> None:
    text = (ROOT / "scripts/gpu").read_text()
    tests = re.findall(r"(tests/\S+?\.py)(?:::(\w+))?", text)
    benchmarks = set(re.findall(r"benchmarks\.(\w+)", text))
    assert len(tests) > 3 and len(benchmarks) > 5
    for path, name in tests:
        assert not name or f"\ndef {name}(" in (ROOT / path).read_text(), f"scripts/gpu: {path} has no {name}"
    for name in benchmarks:
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), f"scripts/gpu: there is no benchmarks.{name}"
