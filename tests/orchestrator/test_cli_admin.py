"""Commands about reasons, output, quotas and the record of changes."""

from __future__ import annotations

import json

import pytest

from orchestrator.cli import app
from orchestrator.client import Client
from tests.orchestrator.conftest import World
from tests.orchestrator.test_cli import client, run, runner  # noqa: F401  (client is a fixture)
from tests.orchestrator.test_log_routes import ended


@pytest.fixture
def database_kind() -> str:
    return "sqlite"  # commands see documents, whatever holds them


def test_nothing_is_said_to_be_nothing(world: World, client: Client) -> None:  # noqa: F811
    assert "there are no jobs" in run("list")
    assert "no job matches these filters" in run("list", "--state", "FAILED")
    assert "no project has a quota" in run("quota")
    assert "nothing was changed yet" in run("audit")
    job_id = world.submit()
    assert "has written nothing yet" in run("logs", job_id)
    assert "has saved nothing" in run("checkpoints", job_id)


def test_why_and_what_it_wrote(world: World, client: Client) -> None:  # noqa: F811
    job_id = ended(world)
    assert "SUCCEEDED since" in run("explain", job_id)
    assert json.loads(run("explain", job_id, "--json"))["causes"][0]["code"] == "completed"
    text = run("logs", job_id, "--rank", "1")
    assert text.splitlines()[-1].endswith("last") and "line 1 " not in text
    lines = [json.loads(line) for line in run("logs", job_id, "-f", "--json").splitlines() if line.startswith("{")]
    assert len(lines) == 2005 and lines[0]["next_offset"] == lines[1]["offset"]


def test_quotas_and_the_record(world: World, client: Client) -> None:  # noqa: F811
    assert "p                    may use cpus 2, jobs 3" in run("quota", "p", "--cpus", "2", "--jobs", "3")
    assert json.loads(run("quota", "--json"))["quotas"][0]["project"] == "p"
    assert "PUT /v1/quotas/p  200" in run("audit", "--target", "p")


def test_old_checkpoints_are_listed_and_removed_when_told(
    world: World,
    client: Client,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DMUON_STATE_DIR", str(world.settings.state_dir))
    root = world.settings.state_dir / "checkpoints"
    assert "no job that ended 30 days ago" in run("clean")
    over, alive = ended(world), world.submit()
    for name in (over, alive, "somebody"):
        (root / name / "step-1").mkdir(parents=True)
        (root / name / "step-1" / "weights").write_bytes(bytes(100))
    listed = run("clean", "--older-than-days", "1")  # by the service's clock of 1970 it ended long ago
    assert f"{over}  100 bytes  SUCCEEDED" in listed and "would be removed" in listed and "100 bytes can be" in listed
    assert f"{alive}  100 bytes  SUBMITTED: left alone" in listed
    assert "somebody  100 bytes  of no job of this service: left alone" in listed
    assert len(list(root.iterdir())) == 3, "saying is not doing"
    assert ": removed" in run("clean", "--yes")
    assert sorted(path.name for path in root.iterdir()) == sorted([alive, "somebody"])


def test_completion_is_offered() -> None:
    assert "--install-completion" in runner.invoke(app, ["--help"]).output
