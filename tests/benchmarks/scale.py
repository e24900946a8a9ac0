"""Many stages on one machine: what grows with their number, and how fast.

python -m tests.benchmarks.scale 4 16 32 64 [--plot growth.svg]
python -m tests.benchmarks.scale --write    # the guide's table and plot

Each stage is one `Linear(64, 64)` and SGD, a step has 16 micro-batches, so nearly all time is that
of rpcmp itself. `rpcmp drive` trains as a user's does, with recovery, in processes of its own, on
stage servers that it starts; then one worker after the other is killed. Prints, in Markdown:

- start: seconds from the command to the event `start`;
- step: median seconds; ratio: how many times the bound that is, which is the CPU time of the same
  step in one process of plain PyTorch with one thread, divided by the number of cores;
- cpu: milliseconds of all processes per step and stage;
- driver: milliseconds of the driver process's CPU per micro-batch;
- worker, server: MiB of a stage's worker beyond its model, and of its server: medians of PSS, where
  a page counts in equal parts for all processes that share it;
- recovery: median seconds from SIGKILL of a worker to the event `recovered`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

from rpcmp.process.interpreter import compute_environment
from rpcmp.tools.bench.cpu_usage import CpuMeter, MachineTimes, disturbance
from tests.support.places import ROOT
from tests.support.processes import Running, poll_for, running, runs

PAGE, PLOT = ROOT / "rpcmp/guide/benchmarks.md", ROOT / ".github/assets/many-stages.svg"
"""Where `--write` puts what it has measured."""

NOTE = "While this was measured,"
"""Begins the note that something else had used the machine as well."""

NUMBERS = (4, 16, 32, 64)

TIMEOUT = 900.0

WARMUP = 4
"""First steps of a run, which do not count."""

MICROBATCHES = 16

MODEL_MIB = 2 * (64 * 64 + 64) * 4 / 2**20
"""Parameters and gradients of a stage."""

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

ONE_PROCESS = """
import sys, time, torch
from torch import nn
stages, microbatches, steps = map(int, sys.argv[1:])
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(stages)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, targets = torch.randn(2, microbatches, 4, 64)
for step in range(-2, steps):
    if step == 0:
        began = time.process_time()
    for part, target in zip(inputs, targets):
        (nn.functional.mse_loss(model(part), target) / microbatches).backward()
    optimizer.step()
    optimizer.zero_grad()
print((time.process_time() - began) / steps)
"""
"""A step of the same job, with the same micro-batches, as a user writes it without rpcmp."""


@dataclass(frozen=True)
class Measured:
    """Figures of one number of stages; see the introduction."""

    stages: int
    start: float
    recovery: float
    step: float
    ratio: float
    cpu: float
    driver: float
    worker: float
    server: float


HEADS = {
    "stages": "stages",
    "start": "s until training",
    "recovery": "s to recover",
    "step": "s per step",
    "ratio": "times the bound",
    "cpu": "CPU ms per step and stage",
    "driver": "driver's CPU ms per micro-batch",
    "worker": "MiB per worker, without model",
    "server": "MiB per server",
}


class Run:
    """A run of `rpcmp drive`, and what it has reported."""

    def __init__(self, run: Running) -> None:
        self._run = run
        self._meter = CpuMeter()
        self._lines, self._events = 0, list[dict[str, Any]]()

    def so_far(self, name: str) -> list[dict[str, Any]]:
        """Return the events of that name; reads each line once, as the machine is measured."""
        lines = self._run.lines()[self._lines :]
        self._lines += len(lines)
        self._events += [json.loads(line) for line in lines]
        return [event for event in self._events if event["event"] == name]

    def events(self, name: str, count: int) -> list[dict[str, Any]]:
        """Wait until there are `count` events of that name, and return all of them."""

        def found() -> list[dict[str, Any]]:
            if self._run.has_ended():
                raise RuntimeError(f"the run has ended: {self._run.result()}")
            events = self.so_far(name)
            return events if len(events) >= count else []

        events: list[dict[str, Any]] = poll_for(found, f"{count} of {name!r}", TIMEOUT)
        return events

    def step_and_cpu(self, steps: int) -> tuple[float, float, float]:
        """Return a step's median seconds, CPU seconds of all processes, and of the driver's."""
        self.events("step", WARMUP)
        driver = self.so_far("generation")[-1]["driver"]["pid"]
        roots = [self._run.pid], [driver]
        began, before = time.monotonic(), [self._meter.read(root) for root in roots]
        done = len(self.so_far("step"))
        seconds = [event["step_s"] for event in self.events("step", done + steps)[done:]]
        elapsed, after = time.monotonic() - began, [self._meter.read(root) for root in roots]
        # Readings are not at the ends of steps: hence the share of the time.
        share = statistics.fmean(seconds) / elapsed
        everything, ours = ((b - a) * share for a, b in zip(before, after, strict=True))
        return statistics.median(seconds), everything, ours

    def memory(self) -> tuple[float, float]:
        """Return the MiB of a worker and of a server."""
        workers = [each["pid"] for each in self.so_far("generation")[-1]["workers"].values()]
        everything = psutil.Process(self._run.pid).children(recursive=True)
        servers = [child.pid for child in everything if runs(child, "serve")]
        return statistics.median(map(_mib, workers)), statistics.median(map(_mib, servers))

    def recovery(self) -> float:
        """Kill a worker; return the seconds until the run goes on."""
        workers = list(self.so_far("generation")[-1]["workers"].values())
        before = len(self.so_far("recovered"))
        killed = time.time()
        os.kill(workers[len(workers) // 2]["pid"], signal.SIGKILL)
        recovered: float = self.events("recovered", before + 1)[-1]["time"]
        self.events("step", len(self.so_far("step")) + WARMUP)
        return recovered - killed


def _mib(pid: int) -> float:
    """Return the memory of a process, each page divided by the number of processes that have it."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"(?m)^Pss: +(\d+) kB", text))) / 1024


def bound(stages: int, steps: int) -> float:
    """Return the seconds of a step if all cores shared the work of one process, and only that."""
    arguments = [sys.executable, "-c", ONE_PROCESS, *map(str, (stages, MICROBATCHES, steps))]
    environment = {**os.environ, **compute_environment(threads=1)}
    out = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return float(out) / len(os.sched_getaffinity(0))


def measure(stages: int, steps: int, kills: int) -> Measured:
    """Run a job with that many stages."""
    least = bound(stages, steps)
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
            recovery = statistics.median(run.recovery() for _ in range(kills))
    return Measured(
        stages,
        start,
        recovery,
        step,
        step / least,
        cpu * 1e3 / stages,
        driver * 1e3 / MICROBATCHES,
        worker - MODEL_MIB,
        server,
    )


def row(cells: Iterable[object]) -> str:
    """Format a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def figures(found: Measured) -> str:
    """Format a row with what was measured."""
    values = [getattr(found, name) for name in HEADS]
    return row(each if isinstance(each, int) else f"{each:.3g}" for each in values)


def growth(first: Measured, last: Measured) -> str:
    """Describe how many times as large each figure has become."""
    times = (
        f"{head} {getattr(last, name) / getattr(first, name):.1f}" for name, head in HEADS.items()
    )
    return f"From {first.stages} to {last.stages} stages, times as large: {'; '.join(times)}."


def write(table: str, page: Path, below: str = rf"(?:\n(?:From \d+ to|{NOTE}) .*\n)*") -> None:
    """Replace the table of a page that has the same columns.

    Args:
        below: a pattern of what is replaced as well: growth and note by default.
    """
    head = table.partition("\n")[0]
    pattern = rf"{re.escape(head)}\n(?:\|.*\n)+{below}"
    text, count = re.subn(pattern, lambda _: table, page.read_text(encoding="utf-8"))
    if count != 1:
        raise click.ClickException(f"{page} has {count} tables with these columns")
    page.write_text(text, encoding="utf-8")


def save(drawn: Any, path: Path) -> None:
    """Write a drawing to a file, in a format by its suffix.

    It is without dates and random names, so that only what was measured changes it.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "rpcmp", "svg.fonttype": "none"}):
        drawn.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def plot(found: list[Measured], path: Path) -> None:
    """Draw how many times as large each figure has become, in a format by the file's suffix."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawn.add_subplot()
    stages = [each.stages for each in found]
    for name, head in HEADS.items():
        values = [getattr(each, name) / getattr(found[0], name) for each in found]
        is_stages = name == "stages"
        label = "in proportion to the stages" if is_stages else head
        axes.plot(stages, values, "k--" if is_stages else "o-", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(stages, [str(each) for each in stages])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("stages")
    axes.set_ylabel(f"times as large as with {stages[0]} stages")
    axes.legend(fontsize=8)
    save(drawn, path)


@click.command()
@click.argument("stages", type=click.IntRange(min=2), nargs=-1)
@click.option("--steps", type=click.IntRange(min=1), default=30, help="Measured for each number.")
@click.option("--kills", type=click.IntRange(min=1), default=3, help="Workers to lose in turn.")
@click.option("--plot", "path", type=click.Path(path_type=Path), help="Draw the growth.")
@click.option("--write", "writes", is_flag=True, help="Write the guide's table and its plot.")
def main(stages: tuple[int, ...], steps: int, kills: int, path: Path | None, writes: bool) -> None:
    """Measure jobs with these numbers of STAGES, by default 4, 16, 32 and 64."""
    lines = [row(HEADS.values()), row("---" for _ in HEADS)]
    print(*lines, sep="\n")
    meter, found = CpuMeter(), list[Measured]()
    before = MachineTimes.read(meter)
    for number in stages or NUMBERS:
        found.append(measure(number, steps, kills))
        lines.append(figures(found[-1]))
        print(lines[-1], flush=True)
    below = [] if len(found) == 1 else ["", growth(found[0], found[-1])]
    if note := disturbance(before, MachineTimes.read(meter)):
        below += ["", f"{NOTE} {note}."]
    print(*below, sep="\n")
    lines += below
    if path is not None:
        plot(found, path)
    if writes:
        write("\n".join([*lines, ""]), PAGE)
        plot(found, PLOT)


if __name__ == "__main__":
    main()
