"""How long a run takes to start and to end, next to `import torch` and to one process.

python -m tests.benchmarks.start              a run of one step / python -c "import torch", in pairs
python -m tests.benchmarks.start connect      the same at standing servers, which have had a job
python -m tests.benchmarks.start digits       all ten epochs / the same training in one process

How long it takes until many stages train is in `tests.benchmarks.scale`. Beside the clock, the CPU
seconds of all processes: the clock means little on a busy machine.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.places import EXAMPLES

PAIRS = 9

DIGITS = EXAMPLES / "digits.toml"


ALONE = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader
sys.path.insert(0, sys.argv[1])
import digits

model = nn.Sequential(*(factory() for _, factory in digits.layers()))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
loss = nn.CrossEntropyLoss()
for _ in range(10):
    model.train()
    for images, classes in DataLoader(digits.dataset("train"), batch_size=64, shuffle=True):
        optimizer.zero_grad()
        for x, y in zip(images.chunk(4), classes.chunk(4)):
            (loss(model(x), y) / 4).backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        for images, classes in DataLoader(digits.dataset("test"), batch_size=64):
            (model(images).argmax(1) == classes).sum().item()
"""
"""The training of digits.toml without our code."""


class Cost(NamedTuple):
    """Seconds by the clock, and of all processors."""

    clock: float
    cpu: float


def cost_of(command: Sequence[str | Path]) -> Cost:
    """Run a command to its end."""
    before, began = os.times(), time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    clock, now = time.monotonic() - began, os.times()
    used = now.children_user + now.children_system
    return Cost(clock, used - before.children_user - before.children_system)


def drive(config: Path, *options: str) -> list[str | Path]:
    own = ("--set", "log.folder=", "--json")
    return [sys.executable, "-m", "rpcmp", "drive", config, *own, *options]


def compare(ours: Sequence[str | Path], theirs: Sequence[str | Path], pairs: int = PAIRS) -> None:
    """Print medians and the medians of the ratios within a pair, of which each begins in turn."""
    both = (ours, theirs)
    found: tuple[list[Cost], list[Cost]] = ([], [])
    for number in range(pairs):
        for side in (0, 1) if number % 2 else (1, 0):
            found[side].append(cost_of(both[side]))
    for index, name in enumerate(Cost._fields):
        mine, other = ([cost[index] for cost in costs] for costs in found)
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        median, least, most = statistics.median(ratios), min(ratios), max(ratios)
        print(
            f"{name:5}: {statistics.median(mine):.2f} / {statistics.median(other):.2f} s, "
            f"{pairs} ratios, median {median:.2f}, {least:.2f} to {most:.2f}"
        )


def start() -> None:
    compare(drive(DIGITS, "--steps", "1"), [sys.executable, "-c", "import torch"])


def connect() -> None:
    with _servers(2) as addresses:
        ours = drive(DIGITS, "--steps", "1", "--connect", ",".join(addresses))
        cost_of(ours)  # their fork servers start with the first job
        compare(ours, [sys.executable, "-c", "import torch"])


@contextlib.contextmanager
def _servers(count: int) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        runs = []
        for index in range(count):
            place = ("--stage", str(index), "--listen", "127.0.0.1:0")
            command = [sys.executable, "-m", "rpcmp", "serve", *place, "--data", str(EXAMPLES)]
            run = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(run.terminate)
            runs.append(run)
        yield [run.stdout.readline().split()[-1] for run in runs if run.stdout is not None]


def digits() -> None:
    # Its environment is that of our processes, which MKL and the allocator read.
    alone = ["env", "OMP_NUM_THREADS=1", sys.executable, "-c", ALONE, str(EXAMPLES)]
    compare(drive(DIGITS), alone)


MODES: dict[str, Callable[[], None]] = {each.__name__: each for each in (start, connect, digits)}

if __name__ == "__main__":
    MODES[sys.argv[1] if sys.argv[1:] else "start"]()
