"""Take the README's picture of the page: a real run of four stages, after one was killed.

python -m tests.benchmarks.screenshot [FOLDER]    page-light.png and page-dark.png; .github/assets
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.support.browsers import chromium, opened
from tests.support.places import EXAMPLES, ROOT
from tests.support.processes import Running, running

ASSETS = ROOT / ".github" / "assets"

KILLED_AFTER, SHOWN_AFTER = 40, 90
"""Steps."""

WIDTH, HEIGHT = 1280, 1600


def main() -> None:
    """Run, kill, wait, and take the pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS
    command = ("drive", EXAMPLES / "unet.toml", "--ui", "127.0.0.1:0", "--json")
    keys = ("epochs=100", "evaluate_every_steps=25", "schedule=zero-bubble", "log.folder=")
    settings = [part for key in keys for part in ("--set", key)]
    with running(*command, *settings) as run, chromium() as browser:
        url = run.wait_for_line(r'"event": "ui", "url": "([^"]+)"')[1]
        run.wait_for_line(rf'"event": "step", "step": {KILLED_AFTER}\b', timeout=300)
        os.kill(_worker(run, "coarse"), signal.SIGKILL)
        run.wait_for_line(rf'"event": "step", "step": {SHOWN_AFTER}\b', timeout=300)
        for name, dark in (("light", False), ("dark", True)):
            _take(browser, url, folder / f"page-{name}.png", dark)


def _worker(run: Running, stage: str) -> int:
    """Return the process id of a stage's worker from the run's events."""
    line = run.wait_for_line('"event": "generation"').string
    pid: int = json.loads(line)["workers"][stage]["pid"]
    return pid


def _take(browser: Browser, url: str, path: Path, dark: bool) -> None:
    with opened(browser, url, dark=dark) as (tab, seen):
        tab.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        expect(tab.locator("#timeline canvas")).to_be_visible()
        tab.mouse.move(0, 0)
        tab.wait_for_timeout(1000)  # the page draws one second
        tab.screenshot(path=path)
        assert seen.errors == []


if __name__ == "__main__":
    main()
