"""Cost of observing a run, and time until a fault is visible.

python -m tests.benchmarks.looking [PAIRS]

Pairs of runs of the case `transformer`: one with page, metrics, run folder and trace, one with none
of them; which comes first changes from pair to pair.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from rpcmp.tools.bench import cases
from tests.support.browsers import chromium, opened
from tests.support.places import EXAMPLES
from tests.support.processes import rpcmp_process, running

PAIRS = 9
STEPS, WARMUP = 22, 3
KILLS = 3


def as_toml(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, dict):
        pairs = (f"{key} = {as_toml(one)}" for key, one in value.items() if one is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value)


def step_seconds(config: Path, *options: object) -> float:
    """Return the mean time of a run's steps after its first few."""
    result = rpcmp_process("drive", config, "--json", *map(str, options), timeout=300)
    steps = [event["step_s"] for event in result.events if event["event"] == "step"]
    return float(statistics.mean(steps[WARMUP:]))


def ratios(folder: Path, pairs: int) -> list[float]:
    """Return the ratio of an observed step to one that is not, per pair."""
    job = cases.load("transformer").config.model_dump(mode="json", exclude_unset=True)
    job = {**job, "steps": STEPS, "epochs": None}
    config = folder / "transformer.toml"
    config.write_text("\n".join(f"{k} = {as_toml(v)}" for k, v in job.items() if v is not None))
    unseen: tuple[object, ...] = ("--set", 'log.folder=""')
    seen = (
        *("--ui", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--trace", folder / "run.json.gz"),
        *("--set", f'log.folder="{folder / "runs"}"'),
    )
    found = []
    for number in range(pairs):
        runs = [unseen, seen][:: -1 if number % 2 else 1]
        seconds = {options: step_seconds(config, *options) for options in runs}
        found.append(seconds[seen] / seconds[unseen])
        print(f"pair {number + 1}: {found[-1]:.3f}", flush=True)
    return found


def fault_and_paint() -> tuple[list[float], float]:
    """Return the seconds from SIGKILL of a worker until its node is red, and to the first paint."""
    options = ("--json", "--ui", "127.0.0.1:0", "--set", "epochs=1000", "--set", 'log.folder=""')
    seconds = []
    with running("drive", EXAMPLES / "digits.toml", *options) as run, chromium() as browser:
        url = run.wait_for_line(r'"event": "ui", "url": "([^"]+)"')[1]
        run.wait_for_line('"event": "step", "step": 20,')
        with opened(browser, url) as (tab, _):
            paints = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            tab.wait_for_function(f"{paints} > 0")
            paint = float(tab.evaluate(paints)) / 1e3
            name = sorted(run.result().event("generation")["workers"])[0]
            node = tab.locator(f'.node[data-key="{name}"]')
            for _ in range(KILLS):
                expect(node).to_have_attribute("data-state", "running", timeout=60_000)
                generation = [e for e in run.result().events if e["event"] == "generation"][-1]
                os.kill(generation["workers"][name]["pid"], signal.SIGKILL)
                killed = time.perf_counter()
                expect(node).to_have_attribute("data-state", "lost")
                seconds.append(time.perf_counter() - killed)
    return seconds, paint


def main() -> None:
    """Print all figures."""
    with tempfile.TemporaryDirectory() as folder:
        found = ratios(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS)
    print(f"a step that is looked at: {statistics.median(found):.3f} of one that is not")
    kills, paint = fault_and_paint()
    shown = ", ".join(f"{each:.2f}" for each in kills)
    print(f"first paint after {paint:.2f} s; a kill is shown after {shown} s")


if __name__ == "__main__":
    main()
