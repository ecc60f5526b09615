"""A real Chromium for tests of the playground; where none is installed they are skipped.

`make test-browser` installs it, and asks with `BROWSER=required` that nothing is skipped. With
`PICTURES=FOLDER` the tests leave pictures of the page there.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.server_process import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PATIENCE_MS = 90_000


def chromium() -> str:
    """The path of the browser; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("BROWSER") == "required":
        pytest.fail("no Chromium is installed, and BROWSER=required")
    if found is None:
        pytest.skip("no Chromium is installed: `make test-browser` installs it")
    return found


@contextmanager
def browsing() -> Iterator[Any]:
    """A browser."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of its own session, and what went wrong on it."""

    page: Any
    url: str
    problems: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def draw(self, prompt: str, **fields: str) -> None:
        self.page.fill("#f-prompt", prompt)
        for name, text in fields.items():
            self.page.fill(f"#f-{name}", text)
        self.page.click("#form button[type=submit]:not([disabled])")

    def card(self, prompt: str, status: str = "completed", within_ms: float = PATIENCE_MS) -> Any:
        """The large card of a prompt's newest drawing, once that has this status."""
        frame = self.page.locator(f'#results [data-status="{status}"][title*="{prompt}"]').first
        frame.wait_for(timeout=within_ms)
        frame.click()
        return self.page.locator("#current .card")

    def choose(self, action: str, card: Any = None) -> None:
        """Choose an entry of a card's menu; of the large one's where none is named."""
        card = self.page.locator("#current .card") if card is None else card
        card.get_by_role("button", name="Actions").click()
        self.page.get_by_role("menuitem", name=action, exact=True).click()

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression holds. The page's policy forbids Playwright's own."""
        eventually(lambda: bool(self.page.evaluate(expression)), PATIENCE_MS / 1000, expression)

    def picture(self, name: str) -> None:
        if folder := os.environ.get("PICTURES"):
            self.page.screenshot(path=Path(folder) / f"{name}.png")


@contextmanager
def tab(browser: Any, url: str, key: str = "", **options: Any) -> Iterator[Tab]:
    """Open the page; at the end nothing may have gone wrong, nor been asked of another host.

    Args:
        key: is in the session already.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
    context.set_default_timeout(PATIENCE_MS)
    if key:
        context.add_init_script(f"sessionStorage.setItem('carpool-key', '{key}')")
    page = context.new_page()
    opened = Tab(page, url)
    page.on("pageerror", lambda error: opened.problems.append(str(error)))
    page.on("console", lambda said: opened.problems.append(said.text) if _is_bad(said) else None)
    page.on("request", lambda request: opened.hosts.add(request.url.split("/")[2]))
    page.goto(url)
    try:
        yield opened
        assert not opened.problems, opened.problems
        ours = url.split("/")[2]
        assert opened.hosts - {""} <= {ours, *(h for h in opened.hosts if ";base64," in h)}
    finally:
        context.close()


def _is_bad(said: Any) -> bool:
    """Errors and warnings, answers that the page itself shows aside."""
    harmless = ("Failed to load resource", "GL Driver Message")  # the last when a test reads pixels
    return said.type in ("error", "warning") and not any(text in said.text for text in harmless)
