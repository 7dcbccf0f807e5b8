"""An operator without Grafana: the live page in a real browser, on a job that runs, watched by a real Prometheus too.

What an operator does here is also what fills the panels that are empty until it happens.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from dashboards.boards import BOARDS
from orchestrator.cli.own_service import OwnService
from tests.e2e.browser import DESKTOP, PHONE, open_page
from tests.e2e.jobs import small, submit, wait_for, wait_until_ended
from tests.e2e.prometheus import LATER, Prometheus, running_prometheus

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]


GREW = "before => parseInt(document.querySelector('[data-tile=Step]').textContent) > before"


def tile(page: Page, name: str) -> str:
    return page.locator(f'[data-tile="{name}"]').inner_text()


def step(page: Page) -> int:
    return int(tile(page, "Step").split("/")[0])


def press(page: Page, name: str) -> None:
    """Find a button by the keyboard alone and press it."""
    button = page.get_by_role("button", name=name, exact=True)
    button.focus()
    page.keyboard.press("Enter")


def focused(page: Page) -> str:
    """The name of what has the focus."""
    name: str = page.evaluate(
        "() => { const at = document.activeElement;"
        " return (at.getAttribute('aria-label') ?? at.labels?.[0]?.innerText ?? at.innerText).trim(); }"
    )
    return name


def tab_to(page: Page, name: str) -> None:
    """Go on with the Tab key alone until what is called ``name`` has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if focused(page) == name:
            return
    raise AssertionError(f"the keyboard does not come to {name!r}; it is at {focused(page)!r}")


def say(page: Page, reason: str) -> None:
    """Answer the dialog: a reason and a yes."""
    expect(page.locator("#confirm")).to_be_visible()
    page.locator("#confirm-reason").fill(reason)
    page.locator("#confirm-yes").click()


def running(page: Page, kernel: str) -> None:
    expect(page.locator(f'[data-kernel="{kernel}"]')).to_have_attribute("data-running", "true", timeout=30_000)


@contextmanager
def opened_by_itself(page: Page, kernel: str, job_id: str) -> Iterator[None]:
    """Let the page read that a breaker of the job opened by itself: no kernel here is wrong; what it sends is real."""
    moved = {"job": job_id, "state": "open", "step": 7, "reason": "relative_error 0.2 is above 0.05"}

    def read(route: Route) -> None:
        if route.request.method != "GET":
            return route.fallback()
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"runtime": [moved]})

    page.route(f"**/v1/kernels/{kernel}/breaker", read)
    try:
        yield
    finally:
        page.unroute_all(behavior="wait")  # an answer on its way must not be answered twice


def brightness(page: Page) -> float:
    """Of the page behind the text, 0 to 255; NaN where one could not read the text on it."""
    found: float = page.evaluate(
        "() => { const of = c => c.match(/[0-9.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3;"
        " const { backgroundColor: behind, color } = getComputedStyle(document.body);"
        " return Math.abs(of(color) - of(behind)) > 120 ? of(behind) : NaN; }"
    )
    return found


def wide(page: Page) -> int:
    """How much wider than the window the document is."""
    found: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return found


_NO_GPU = "there is no GPU here; tests/worker/test_gpus_cuda.py has one, tests/orchestrator/test_gpus.py the figures"
NOT_CAUSED = {
    "Alerts": "an alert of a job lasts minutes before it fires; promtool's tests fire each",
    "Processes on GPUs without a job": _NO_GPU,
    "GPUs that cannot be watched": _NO_GPU,
}
"""Marks and panels that no test fills, and why."""


def filled_by_events() -> dict[str, str]:
    """Every query of a panel or a mark that is empty until its event, by board and title."""
    found = {name: name for name in LATER}
    for board in BOARDS:
        filled = [panel for panel in board.panels if panel.filled_by is not None and panel.title not in NOT_CAUSED]
        found |= {f"{board.uid} / {p.title} / {q.expr}": q.expr for p in filled for q in p.queries}
        marks = [mark for mark in board.annotations if mark.name not in NOT_CAUSED]
        found |= {f"{board.uid} / mark {mark.name}": mark.expr for mark in marks}
    return found


COMPARED = {"kernel": "blocked", "breaker": {"check_every_calls": 20, "slow_factor": 1e3}}
"""Compared again and again: a counter that is there from the first look has no rate until it grows."""
AT_MOST = {
    "Kernel swaps by result, in a day": 1.5, "Breaker changes, in a day": 2.5, "Jobs that ended, by reason": 1.5,
    "Queue wait": 900.0, "Oldest heartbeat": 60.0, "Age of the last checkpoint": 240.0, "mark": 10.0,
}  # fmt: skip
"""By title: one swap, two trips and two resets, one end, which Prometheus may see a little larger; and ages."""


def wait_until_filled(prometheus: Prometheus, job_id: str, left: dict[str, str]) -> None:
    """Ask until each query in ``left`` has shown its event once, in some look at a moment that passes; empty it.

    A query has when a series is above zero, and none is above what the test has done (:data:`AT_MOST`).
    """
    deadline, spans = time.monotonic() + 40, {"$job": job_id, "$__interval": "5m", "$__rate_interval": "3m"}
    while left:
        for where, expr in list(left.items()):
            for name, value in spans.items():
                expr = expr.replace(name, value)
            shown = [float(entry["value"][1]) for entry in prometheus.query(expr)]
            highest = next((most for title, most in AT_MOST.items() if f" / {title}" in where), math.inf)
            assert not any(value > highest for value in shown), f"{where}: {shown}, expected at most {highest}"
            if any(0 < value < math.inf for value in shown):
                del left[where]
        assert not left or time.monotonic() < deadline, f"their event has happened and they are empty: {list(left)}"
        time.sleep(0.5)


def test_watch_a_job_trip_its_kernel_swap_it_and_cancel(service: OwnService, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    with (
        service.client() as client,
        running_prometheus(service, tmp_path) as prometheus,
        open_page(f"{service.url}/") as (page, complaints),
    ):
        expect(page.locator("#token-dialog")).to_be_visible()
        complaints.clear()  # the browser notes the 401 that asked for the token
        page.locator("#token-input").fill(service.token)
        page.get_by_role("button", name="Use it").click()
        job = submit(client, small(kernels=COMPARED, training={"steps": 4000}, checkpoint={"every_steps": 2000}))
        wait_for(client, job.id, lambda seen: seen.progress.step >= 5)
        page.goto(f"{service.url}/#job={job.id}&token={service.token}")
        page.reload()
        assert service.token not in page.url, "the token does not stay in the address"
        expect(page.locator("#job-state")).to_have_text("RUNNING")
        first = step(page)
        page.wait_for_function(GREW, arg=first)
        assert float(tile(page, "Loss")) > 0
        expect(page.locator("#verified")).to_contain_text("What ran is what was planned")
        for route in ("muon", "adamw", "sharded_adamw"):
            expect(page.locator(f'[data-overlap="{route}"] .figure')).to_contain_text("%")
        expect(page.locator("#owners")).to_contain_text("Most time: rank")
        assert page.locator(".u-wrap canvas").count() == 2
        running(page, "blocked")
        page.screenshot(path=tmp_path / "live-light.png", full_page=True)

        tab_to(page, "Trip blocked")
        page.keyboard.press("Enter")
        tab_to(page, "Trip blocked")
        page.keyboard.press("Enter")
        expect(page.locator("#confirm")).to_be_visible()  # no reason, no trip
        page.keyboard.press("Escape")
        expect(page.locator("#confirm")).to_be_hidden()
        assert client.breaker("blocked").jobs.get(job.id) is None
        assert focused(page) == "Trip blocked", "one is back where one was"
        page.keyboard.press("Enter")
        tab_to(page, "Reason")
        page.keyboard.type("a trial in the browser")
        tab_to(page, "Trip blocked")
        page.keyboard.press("Enter")
        running(page, "cublas")
        expect(page.locator('[data-kernel="blocked"]')).to_have_attribute("data-running", "false")
        expect(page.locator('[data-kernel="blocked"]')).to_contain_text("a trial in the browser")
        expect(page.locator('#events [data-kind="kernel_changed"]')).to_have_count(1)
        assert str(client.breaker("blocked").jobs[job.id]) == "forced_open"
        assert brightness(page) > 200
        page.emulate_media(color_scheme="dark")
        expect(page.locator("html")).to_have_attribute("data-theme", "dark")
        assert brightness(page) < 50
        page.screenshot(path=tmp_path / "live-dark.png", full_page=True)
        press(page, "Reset blocked")
        say(page, "the trial is over")
        running(page, "blocked")

        blocked = page.locator('[data-kernel="blocked"]')
        expect(blocked.get_by_role("button", name="Force blocked")).to_be_disabled()  # while it runs, one trips it
        with opened_by_itself(page, "blocked", job.id):
            expect(blocked).to_contain_text("by itself at step 7: relative_error 0.2 is above 0.05")
            expect(blocked.get_by_role("button", name="Trip blocked")).to_be_disabled()
            press(page, "Force blocked")
            say(page, "no more trials of it")
            running(page, "cublas")
            expect(blocked).to_contain_text("no more trials of it")
        expect(blocked.get_by_role("button", name="Force blocked")).to_be_disabled()
        assert str(client.breaker("blocked").jobs[job.id]) == "forced_open"
        press(page, "Reset blocked")
        say(page, "it is mended")
        running(page, "blocked")

        press(page, "Swap kernel…")
        page.locator("#target-kernel").select_option("cublas")
        page.locator("#target-coefficients").select_option("you")
        page.screenshot(path=tmp_path / "live-swap.png")
        say(page, "another trial")
        expect(page.locator("#swap-state")).to_contain_text("committed at step", timeout=60_000)
        running(page, "cublas")

        page.set_viewport_size(PHONE)
        page.wait_for_timeout(500)  # the charts follow the window
        assert wide(page) <= 0, "a phone does not scroll sideways"
        page.screenshot(path=tmp_path / "live-phone.png", full_page=True)
        page.set_viewport_size(DESKTOP)
        press(page, "Pause")
        page.locator("#confirm-yes").click()
        expect(page.locator("#job-state")).to_have_text("PAUSED", timeout=60_000)
        expect(page.locator('[data-kernel="cublas"]')).to_have_attribute("data-running", "false")
        press(page, "Resume")
        page.locator("#confirm-yes").click()
        running(page, "cublas")  # what was swapped in runs in the next attempt too
        filled = filled_by_events()
        ended = {where: filled.pop(where) for where in list(filled) if "Jobs that ended" in where}
        wait_until_filled(prometheus, job.id, filled)
        press(page, "Cancel job")
        page.locator("#confirm-yes").click()
        expect(page.locator("#job-state")).to_have_text("CANCELLED", timeout=60_000)
        wait_until_ended(client, job.id)
        wait_until_filled(prometheus, job.id, ended)
        assert not complaints, complaints
