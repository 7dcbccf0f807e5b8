"""An operator without Grafana: the live page in a real browser, on a job that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from orchestrator.cli.own_service import OwnService
from tests.e2e.browser import DESKTOP, PHONE, open_page
from tests.e2e.jobs import small, submit, wait_for, wait_until_ended

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


def say(page: Page, reason: str) -> None:
    """Answer the dialog: a reason and a yes."""
    expect(page.locator("#confirm")).to_be_visible()
    page.locator("#confirm-reason").fill(reason)
    page.locator("#confirm-yes").click()


def running(page: Page, kernel: str) -> None:
    expect(page.locator(f'[data-kernel="{kernel}"]')).to_have_attribute("data-running", "true", timeout=30_000)


def wide(page: Page) -> int:
    """How much wider than the window the document is."""
    found: int = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    return found


def test_watch_a_job_trip_its_kernel_swap_it_and_cancel(service: OwnService, tmp_path: Path) -> None:
    with service.client() as client, open_page(f"{service.url}/") as (page, complaints):
        expect(page.locator("#token-dialog")).to_be_visible()
        complaints.clear()  # the browser notes the 401 that asked for the token
        page.locator("#token-input").fill(service.token)
        page.get_by_role("button", name="Use it").click()
        job = submit(client, small(kernels={"kernel": "blocked"}, training={"steps": 4000}))
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

        press(page, "Trip blocked")
        page.locator("#confirm-yes").click()
        expect(page.locator("#confirm")).to_be_visible()  # no reason, no trip
        page.locator("#confirm-no").click()
        assert client.breaker("blocked").jobs.get(job.id) is None
        press(page, "Trip blocked")
        say(page, "a trial in the browser")
        running(page, "cublas")
        expect(page.locator('[data-kernel="blocked"]')).to_have_attribute("data-running", "false")
        expect(page.locator('[data-kernel="blocked"]')).to_contain_text("a trial in the browser")
        expect(page.locator('#events [data-kind="kernel_changed"]')).to_have_count(1)
        assert str(client.breaker("blocked").jobs[job.id]) == "forced_open"
        page.emulate_media(color_scheme="dark")
        page.screenshot(path=tmp_path / "live-dark.png", full_page=True)
        press(page, "Reset blocked")
        say(page, "the trial is over")
        running(page, "blocked")

        press(page, "Swap kernel…")
        page.locator("#target-kernel").select_option("cublas")
        say(page, "another trial")
        expect(page.locator("#swap-state")).to_contain_text("committed at step", timeout=60_000)
        running(page, "cublas")

        page.set_viewport_size(PHONE)
        page.wait_for_timeout(500)  # the charts follow the window
        assert wide(page) <= 0, "a phone does not scroll sideways"
        page.screenshot(path=tmp_path / "live-phone.png", full_page=True)
        page.set_viewport_size(DESKTOP)
        press(page, "Cancel job")
        page.locator("#confirm-yes").click()
        expect(page.locator("#job-state")).to_have_text("CANCELLED", timeout=60_000)
        wait_until_ended(client, job.id)
        assert not complaints, complaints
