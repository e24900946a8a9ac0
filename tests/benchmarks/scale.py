"""Many stages on one machine: what grows with their number, and how fast.

python -m tests.benchmarks.scale 4 16 32 64 [--plot growth.svg]

Each stage is one `Linear(64, 64)` and SGD, a step has 16 micro-batches, so nearly all time is that
of rpcmp itself. `rpcmp drive` trains as a user's does, with recovery, in processes of its own, on
stage servers that it starts; then one worker after the other is killed. Prints, in Markdown:

- start: seconds from the command to the event `start`;
- step: median seconds; CPU: seconds of all processes a step; cores: how many of them that is;
- driver: milliseconds of the driver process's CPU a micro-batch;
- worker, server: MiB of a stage's worker and of its server, medians, shared pages in proportion;
- recovery: median seconds from SIGKILL of a worker to the event `recovered`.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from rpcmp.tools.bench.cpu_usage import CpuMeter
from tests.support.processes import Running, poll_for, running, runs

TIMEOUT = 900.0

WARMUP = 4
"""First steps of a run, which do not count."""

MICROBATCHES = 16

MODEL = """
from torch import nn

def layers(count):
    return [(f"linear{index}", lambda: nn.Linear(64, 64)) for index in range(count)]
"""

JOB = """
steps = 1000000
loss = "torch.nn:MSELoss"
num_microbatches = {microbatches}
log.folder = ""
[optimizer]
callable = "torch.optim:SGD"
kwargs.lr = 0.01
[model]
layers = "linear:layers"
num_stages = {stages}
kwargs.count = {stages}
[data]
batch_size = {samples}
[data.train]
callable = "rpcmp.tools.bench.models:vectors"
kwargs.num_samples = 256
kwargs.features = 64
"""


@dataclass(frozen=True)
class Measured:
    """Figures of one number of stages; see the introduction."""

    stages: int
    start: float
    step: float
    cpu: float
    cores: float
    driver: float
    worker: float
    server: float
    recovery: float


HEADS = {
    "stages": "stages",
    "start": "s until training",
    "step": "s a step",
    "cpu": "CPU s a step",
    "cores": "cores",
    "driver": "driver, CPU ms a micro-batch",
    "worker": "MiB a worker",
    "server": "MiB a server",
    "recovery": "s to recover",
}


class Run:
    """A run of `rpcmp drive`, and what it has reported."""

    def __init__(self, run: Running) -> None:
        self._run = run
        self._meter = CpuMeter()

    def events(self, name: str, count: int) -> list[dict[str, Any]]:
        """Wait until there are `count` events of that name, and return all of them."""

        def found() -> list[dict[str, Any]]:
            if self._run.has_ended():
                raise RuntimeError(f"the run has ended: {self._run.result()}")
            events = [event for event in self._run.result().events if event["event"] == name]
            return events if len(events) >= count else []

        events: list[dict[str, Any]] = poll_for(found, f"{count} of {name!r}", TIMEOUT)
        return events

    def step_and_cpu(self, steps: int) -> tuple[float, float, float]:
        """Return a step's median seconds, CPU seconds of all processes, and of the driver's."""
        driver = self.events("generation", 1)[0]["driver"]["pid"]
        self.events("step", WARMUP)
        roots = [self._run.pid], [driver]
        began, before = time.monotonic(), [self._meter.read(root) for root in roots]
        done = len(self.events("step", 0))
        seconds = [event["step_s"] for event in self.events("step", done + steps)[done:]]
        elapsed, after = time.monotonic() - began, [self._meter.read(root) for root in roots]
        # Readings are not at the ends of steps: hence the share of the time.
        share = statistics.fmean(seconds) / elapsed
        everything, ours = ((b - a) * share for a, b in zip(before, after, strict=True))
        return statistics.median(seconds), everything, ours

    def memory(self) -> tuple[float, float]:
        """Return the MiB of a worker and of a server."""
        workers = [each["pid"] for each in self.events("generation", 1)[-1]["workers"].values()]
        children = psutil.Process(self._run.pid).children()
        servers = [child.pid for child in children if runs(child, "serve")]
        return statistics.median(map(_mib, workers)), statistics.median(map(_mib, servers))

    def recovery(self, number: int) -> float:
        """Kill a worker, for the `number`-th time; return the seconds until the run goes on."""
        workers = list(self.events("generation", number)[-1]["workers"].values())
        killed = time.time()
        os.kill(workers[len(workers) // 2]["pid"], signal.SIGKILL)
        recovered: float = self.events("recovered", number)[-1]["time"]
        self.events("step", len(self.events("step", 0)) + WARMUP)
        return recovered - killed


def _mib(pid: int) -> float:
    """Return the memory of a process, each page divided by the number of processes that have it."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"(?m)^Pss: +(\d+) kB", text))) / 1024


def measure(stages: int, steps: int, kills: int) -> Measured:
    """Run a job with that many stages."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "linear.py").write_text(MODEL)
        config = Path(folder) / "job.toml"
        sizes = {"stages": stages, "microbatches": MICROBATCHES, "samples": 4 * MICROBATCHES}
        config.write_text(JOB.format(**sizes))
        began = time.time()
        with running("drive", config, "--json", shares=False) as process:
            run = Run(process)
            start = run.events("start", 1)[0]["time"] - began
            step, cpu, driver = run.step_and_cpu(steps)
            worker, server = run.memory()
            recovery = statistics.median(run.recovery(number + 1) for number in range(kills))
    driver *= 1e3 / MICROBATCHES
    return Measured(stages, start, step, cpu, cpu / step, driver, worker, server, recovery)


def row(cells: Iterable[object]) -> str:
    """Format a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def figures(found: Measured) -> str:
    """Format a row with what was measured."""
    values = [getattr(found, name) for name in HEADS]
    return row(each if isinstance(each, int) else f"{each:.3g}" for each in values)


def growth(first: Measured, last: Measured) -> str:
    """Describe how many times as large each figure has become."""
    times = (f"{name} {getattr(last, name) / getattr(first, name):.1f}" for name in HEADS)
    return f"From {first.stages} to {last.stages} stages, times as large: {', '.join(times)}."


def plot(found: list[Measured], path: Path) -> None:
    """Draw how many times as large each figure has become, in a format by the file's suffix."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawn.add_subplot()
    stages = [each.stages for each in found]
    for name, head in HEADS.items():
        values = [getattr(each, name) / getattr(found[0], name) for each in found]
        is_stages = name == "stages"
        label = "in proportion" if is_stages else head.removeprefix("s ")
        axes.plot(stages, values, "k--" if is_stages else "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(stages, [str(each) for each in stages])
    axes.set_xlabel("stages")
    axes.set_ylabel(f"times as large as with {stages[0]} stages")
    axes.legend(fontsize=8)
    drawn.savefig(path)


@click.command()
@click.argument("stages", type=click.IntRange(min=2), nargs=-1)
@click.option("--steps", type=click.IntRange(min=1), default=30, help="Measured for each number.")
@click.option("--kills", type=click.IntRange(min=1), default=3, help="Workers to lose in turn.")
@click.option("--plot", "path", type=click.Path(path_type=Path), help="Draw the growth.")
def main(stages: tuple[int, ...], steps: int, kills: int, path: Path | None) -> None:
    """Measure jobs with these numbers of STAGES, by default 4, 16, 32 and 64."""
    print(row(HEADS.values()))
    print(row("---" for _ in HEADS))
    found = []
    for number in stages or (4, 16, 32, 64):
        found.append(measure(number, steps, kills))
        print(figures(found[-1]), flush=True)
    if len(found) > 1:
        print(f"\n{growth(found[0], found[-1])}")
    if path is not None:
        plot(found, path)


if __name__ == "__main__":
    main()
