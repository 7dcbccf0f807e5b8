"""The warm planning process: answers, refusals, death and silence."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.errors import PlannerFailed, PlanRefusedProblem
from orchestrator.planner import EntryPlanner, ProcessPlanner
from tests.orchestrator.fakes import make_plan, make_spec
from worker.contract.errors import ErrorValue, FieldError
from worker.contract.planning import PlanAnswer

SCRIPT = """
import json, os, sys, time
plan, refusal = open(sys.argv[1]).read(), open(sys.argv[2]).read()
print("a library that talks to standard output", flush=True)
for line in sys.stdin:
    spec = json.loads(line)["spec_json"] or "{}"
    name = json.loads(spec).get("name")
    if name == "die": os._exit(3)
    if name == "silent": time.sleep(60)
    if name == "garbage": print('{"no": "answer"}', flush=True)
    elif name == "fail": print(json.dumps({"failure": {"type": "X", "message": "our bug"}}), flush=True)
    else: print(refusal if name == "refused" else plan, flush=True)
"""


@pytest.fixture
def planner(tmp_path: Path) -> Iterator[ProcessPlanner]:
    spec = make_spec()
    (tmp_path / "plan").write_text(PlanAnswer(plan=make_plan(spec)).model_dump_json())
    error = FieldError(pointer="/model", code="too_large", message="m")
    (tmp_path / "refusal").write_text(PlanAnswer(errors=(error,)).model_dump_json())
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "plan"), str(tmp_path / "refusal")]
    found = ProcessPlanner(words, timeout_s=2.0)
    yield found
    found.close()


def child_ids() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_one_child_answers_many_requests(planner: ProcessPlanner) -> None:
    before = child_ids()
    assert planner.plan(make_spec()) == make_plan(make_spec())
    after = child_ids()
    with pytest.raises(PlanRefusedProblem) as caught:
        planner.plan(make_spec(name="refused"))
    assert caught.value.errors[0].pointer == "/model"
    assert child_ids() == after and len(after - before) == 1
    planner.close()
    assert child_ids() == before


@pytest.mark.parametrize(("name", "text"), [("die", "code 3"), ("garbage", "contract"), ("fail", "our bug")])
def test_failures_are_not_the_users_fault_and_the_next_request_works(
    planner: ProcessPlanner, name: str, text: str
) -> None:
    with pytest.raises(PlannerFailed, match=text):
        planner.plan(make_spec(name=name))
    assert planner.plan(make_spec()).plan_hash == "plan-1"


def test_a_silent_child_is_ended(planner: ProcessPlanner) -> None:
    others = child_ids()
    planner.plan(make_spec())
    (child,) = child_ids() - others
    with pytest.raises(PlannerFailed, match="within 2 s"):
        planner.plan(make_spec(name="silent"))
    assert child not in child_ids()
    assert planner.plan(make_spec()).plan_hash == "plan-1"


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(PlannerFailed, match="cannot be started"):
        ProcessPlanner(["/nothing/here"]).plan(make_spec())


def test_planning_elsewhere() -> None:
    asked = []

    def ask(text: str) -> str:
        asked.append(text)
        return PlanAnswer(plan=make_plan(make_spec())).model_dump_json()

    assert EntryPlanner(ask).plan(make_spec()).plan_hash == "plan-1"
    assert "tiny" in asked[0]


def test_a_failure_is_one_line_and_the_log_has_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def ask(_: str) -> str:
        try:
            raise RuntimeError("first\nsecond " + "x" * 1000)
        except RuntimeError as error:
            return PlanAnswer(failure=ErrorValue.from_exception(error)).model_dump_json()

    with caplog.at_level(logging.ERROR), pytest.raises(PlannerFailed) as caught:
        EntryPlanner(ask).plan(make_spec())
    detail = str(caught.value)
    assert "builtins.RuntimeError: first second" in detail and len(detail) < 600
    assert "\n" not in detail and "Traceback" not in detail
    assert "Traceback (most recent call last)" in caplog.text
