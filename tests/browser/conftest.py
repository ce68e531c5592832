"""A real headless Chromium, and what one page of it asked for and complained about."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import ConsoleMessage, Request

    Open = Callable[..., "Seen"]

_WITHIN_MS = 20_000
SHOTS: list[Path] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the pictures, for people to look at."""
    if SHOTS:
        terminalreporter.section("screenshots")
        for path in SHOTS:
            terminalreporter.write_line(str(path))


@dataclass
class Seen:
    """A page with every address it asked for and every complaint of the browser."""

    page: Page
    folder: Path
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Write down what comes from now on."""

        def request(made: Request) -> None:
            self.asked.append(made.url)

        def console(said: ConsoleMessage) -> None:
            if said.type in {"error", "warning"}:
                self.complaints.append(said.text)

        self.page.on("request", request)
        self.page.on("console", console)
        self.page.on("pageerror", lambda fault: self.complaints.append(str(fault)))

    def shot(self, name: str) -> Path:
        """A picture of the whole page, listed at the end of the run."""
        path = self.folder / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        SHOTS.append(path)
        return path


# Of a module, not of the session: its loop runs in this thread, and other tests have loops too.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The Chromium of the system; tests skip without one."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium on the PATH: apt-get install chromium")
    with sync_playwright() as driver, driver.chromium.launch(executable_path=found) as started:
        yield started


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """``open_page(url, **context)``: a page in a browser context of its own."""
    pages: list[Seen] = []

    def opened(url: str, **options: Any) -> Seen:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(_WITHIN_MS)
        seen = Seen(context.new_page(), tmp_path)
        pages.append(seen)
        seen.watch()
        seen.page.goto(url)
        return seen

    yield opened
    for number, seen in enumerate(pages):
        seen.shot(f"last-{number}")
        print(*seen.complaints, sep="\n")
        seen.page.context.close()
