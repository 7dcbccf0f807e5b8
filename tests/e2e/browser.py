"""A real Chromium (Debian's) that looks at the live page of a service."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, ViewportSize, sync_playwright

__all__ = ["DESKTOP", "PHONE", "open_page"]

DESKTOP: ViewportSize = {"width": 1360, "height": 1000}
PHONE: ViewportSize = {"width": 375, "height": 812}


@contextmanager
def open_page(address: str) -> Iterator[tuple[Page, list[str]]]:
    """Yield the page at ``address``, and a list that fills with what the browser complains about."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    complaints: list[str] = []
    with sync_playwright() as player:
        # Chromium's own sandbox needs rights that a container's root has not; the page is ours.
        browser = player.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_context(viewport=DESKTOP, color_scheme="light", locale="en-GB").new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(address)
        yield page, complaints
        browser.close()
