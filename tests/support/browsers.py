"""A headless Chromium from the system's packages, and the errors of the pages in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.support.needs import needs


@dataclass
class PageActivity:
    """Errors of a page, and the addresses that it requested."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Start recording."""
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._note_request)

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _note_request(self, request: Request) -> None:
        self.requests.append(request.url)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser; its profile is removed afterwards."""
    program = needs("chromium")
    sandbox = os.geteuid() != 0  # as root it needs to run without one
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, chromium_sandbox=sandbox)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, phone: bool = False, dark: bool = False, still: bool = False
) -> Iterator[tuple[Page, PageActivity]]:
    """Open a page in its own window; yield it and its activity.

    Args:
        phone: whether the window is 360 pixels wide, with touch.
        dark: whether the system prefers dark colours.
        still: whether the system prefers reduced motion.
    """
    context = browser.new_context(
        viewport={"width": 360, "height": 740} if phone else {"width": 1280, "height": 900},
        has_touch=phone,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce" if still else "no-preference",
        ignore_https_errors=True,
    )
    seen = PageActivity()
    try:
        page = context.new_page()
        seen.watch(page)
        page.goto(url)
        yield page, seen
    finally:
        context.close()
