"""How fast a run is again after one of its two hosts has become slower: the command is

    python -m tests.benchmarks.rebalance [--slow TIMES] [--milliseconds N] [--seconds N]

Layers sleep instead of computing, so that hosts have speeds of their own on a machine with few
cores. Compares the throughput some seconds after the change with that of the best balance for the
new speeds, each measured for itself; the losses of all runs must be the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from tests.support.processes import JobFolder
from tests.support.rebalanced import train

LAYERS = 8
FIRST = [4, 4]

SETTLES = 12.0
"""Seconds before the change."""

MEASURED = 10.0
"""Seconds of steps whose throughput is compared."""

JOB = """
steps = 1000000
schedule = "1f1b"
rebalance = "{rebalance}"
[model]
layers = "paced:layers"
balance = {balance}
kwargs = {{ folder = "{folder}", count = {layers}, milliseconds = {milliseconds} }}
[data]
train = "paced:samples"
batch_size = 10
[log]
folder = ""
"""


@dataclass
class Bench:
    """Runs of one job, in a folder."""

    folder: Path
    milliseconds: float
    slow: float

    def run(self, balance: list[int], rebalance: str, seconds: float, wait: float) -> list[Any]:
        """Train for some seconds; host stage1 becomes slow after `wait`; return the events."""
        job = JobFolder(Path(tempfile.mkdtemp(dir=self.folder)) / "job")
        slowness = job.folder / "slowness"
        slowness.mkdir()
        config = job.config(
            JOB.format(
                rebalance=rebalance,
                balance=balance,
                folder=slowness,
                layers=LAYERS,
                milliseconds=self.milliseconds,
            )
        )
        started: list[float] = []

        def after_step(event: Any) -> bool:
            started.append(time.time())
            passed = started[-1] - started[0]
            if passed >= wait and not any(slowness.iterdir()):
                (slowness / "stage1:0").write_text(str(self.slow))
            return passed >= wait + seconds

        result = train(config, {}, after_step=after_step)
        return result.events


def throughput(events: list[Any], begin: float) -> float:
    """Return steps per second in the MEASURED seconds from `begin` seconds after the first step."""
    steps = [event for event in events if event["event"] == "step"]
    first = steps[0]["time"]
    window: list[float] = [
        e["step_s"] for e in steps if begin <= e["time"] - first < begin + MEASURED
    ]
    return 1 / mean(window)


def losses(events: list[Any]) -> list[str]:
    return [event["loss"].hex() for event in events if event["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=float, default=2.0)
    parser.add_argument("--milliseconds", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="until it is compared")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.milliseconds, arguments.slow)
        events = bench.run(FIRST, "auto", arguments.seconds + MEASURED, SETTLES)
        for event in events:
            if event["event"] == "rebalance":
                print(f"{event['outcome']} to {event['balance']} in {event['seconds']:.1f} s")
        now = throughput(events, SETTLES + arguments.seconds)
        found = {}
        for first in range(LAYERS // 2, LAYERS):
            other = bench.run([first, LAYERS - first], "off", MEASURED + 2, 0.0)
            found[first] = throughput(other, 2.0)
            same = all(a == b for a, b in zip(losses(events), losses(other), strict=False))
            bits = "same bits" if same else "OTHER BITS"
            print(f"[{first}, {LAYERS - first}]: {found[first]:.2f} steps/s, {bits}", flush=True)
    best = max(found.values())
    print(
        f"{arguments.seconds:g} s later {now:.2f} steps/s, {now / best:.2f} of the best balance's"
    )


if __name__ == "__main__":
    main()
