"""The live page is served to anybody, whole and from this service alone; what it asks for needs a token."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.api.live import FILES
from orchestrator.cli.serving import _page_address
from orchestrator.settings import Settings
from tests.architecture.source import ROOT
from tests.orchestrator.conftest import World
from worker.contract.kernels import Algorithm, CoefficientSet

LIVE = ROOT / "orchestrator" / "live"


def test_the_page_needs_no_token_and_its_calls_do(world: World) -> None:
    del world.client.headers["Authorization"]
    page = world.client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert world.client.get("/v1/jobs").status_code == 401
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy


def test_everything_the_page_names_is_served_from_here(world: World) -> None:
    asked = set(re.findall(r'(?:src|href)="(live/[^"]+)"', (LIVE / "index.html").read_text()))
    scripts = list(LIVE.glob("*.js"))
    asked |= {f"live/{name}" for path in scripts for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert {name.removeprefix("live/") for name in asked} == set(FILES), "nothing is missing and nothing is left over"
    for name in asked:
        answer = world.client.get(f"/{name}")
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff", name


def test_nothing_comes_from_elsewhere() -> None:
    for path in LIVE.rglob("*"):
        if path.suffix in (".html", ".css", ".js") and "vendor" not in path.parts:
            assert not re.search(r"https?://", path.read_text()), f"{path.name} names another server"
            assert "innerHTML" not in path.read_text(), f"{path.name}: text of a job would become markup"
    assert "MIT" in (LIVE / "vendor" / "uPlot.LICENSE").read_text()
    version = re.search(r"uPlot (\d+\.\d+\.\d+)", (LIVE / "vendor" / "README.md").read_text())
    assert version is not None and "uPlot" in (LIVE / "vendor" / "uPlot.iife.min.js").read_text()[:200]


def test_the_page_offers_what_can_be_swapped() -> None:
    text = (LIVE / "index.html").read_text()
    for part, known in (("algorithm", Algorithm), ("coefficients", CoefficientSet)):
        found = re.search(rf'id="target-{part}">(.*?)</select>', text, re.DOTALL)
        assert found is not None and set(re.findall(r'value="(\w+)"', found[1])) == {each.value for each in known}


@pytest.mark.parametrize("name", ["../settings.py", "%2e%2e/settings.py", "vendor/README.md", "index.html", "", "none"])
def test_no_other_file_can_be_asked_for(world: World, name: str) -> None:
    assert world.client.get(f"/live/{name}").status_code == 404


def test_the_address_has_the_token_for_a_person_and_never_for_a_log(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    address = _page_address(settings, "http://127.0.0.1:1", to_person=True)
    token = settings.token_file.read_text().split()[0]
    assert address == f"http://127.0.0.1:1/#token={token}", "in the fragment, which no server and no log sees"
    assert token not in _page_address(settings, "http://127.0.0.1:1", to_person=False)
    assert _page_address(Settings(state_dir=tmp_path, auth=False), "http://127.0.0.1:1", to_person=True)[-1] == "/"
