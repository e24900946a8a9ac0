"""Thousands of steps: memory stays flat, no descriptor and no autograd context is left behind.

The check is worth something only because it finds a leak that is planted.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

import psutil
import pytest

from tests.support.processes import JobFolder, running, runs

KIB = 1024


@dataclass(frozen=True)
class Length:
    """Length of a run, and limits of its growth.

    Attributes:
        settled: steps until memory has settled.
        every: steps between two measurements.
        slope: bytes per step that a process may gain.
        leak: bytes per step that the check must find.
    """

    steps: int
    settled: int
    every: int
    slope: float
    leak: int


SHORT = Length(steps=600, settled=300, every=20, slope=8 * KIB, leak=40 * KIB)
LONG = Length(steps=5000, settled=500, every=50, slope=0.5 * KIB, leak=1 * KIB)


@dataclass(frozen=True)
class ResourceUsage:
    """Resources of one process at one step."""

    step: int
    resident: int
    descriptors: int


def watch(job: JobFolder, length: Length, leak: int) -> dict[str, list[ResourceUsage]]:
    """Return the resources of every process of a run, by kind and number."""
    config = job.config(
        f"""
        steps = {length.steps}
        optimizer = {{ callable = "torch.optim:Adam", kwargs = {{ lr = 0.001 }} }}
        [model]
        layers = "zoo:leaking"
        kwargs = {{ leak = {leak} }}
        balance = [1, 2]
        """
    )
    seen: defaultdict[str, list[ResourceUsage]] = defaultdict(list)
    with running("drive", config, "--json") as run:
        run.wait_for_line('"start"')
        processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        names = [f"{_kind(process)} {number}" for number, process in enumerate(processes)]
        for step in range(length.settled, length.steps - length.every, length.every):
            run.wait_for_line(f'"event": "step", "step": {step},', timeout=240)
            for name, process in zip(names, processes, strict=True):
                with process.oneshot():
                    found = ResourceUsage(step, process.memory_info().rss, process.num_fds())
                seen[name].append(found)
        assert run.wait(240).code == 0
    return seen


def _kind(process: psutil.Process) -> str:
    kinds = ("drive", "serve", "rpcmp.process", "rpcmp.driver", "rpcmp.worker")
    return next(kind for kind in kinds if runs(process, kind))


def slope(seen: list[ResourceUsage]) -> float:
    """Bytes gained a step: the median of all pairs' slopes (Theil and Sen), so that a single jump
    of the allocator does not count."""
    return statistics.median(
        (later.resident - sooner.resident) / (later.step - sooner.step)
        for index, sooner in enumerate(seen)
        for later in seen[index + 1 :]
    )


def growing(seen: dict[str, list[ResourceUsage]], length: Length) -> list[str]:
    """Return the processes that gain memory with every step, or more than 2 %."""
    found = []
    for name, values in seen.items():
        first, last = values[0].resident, values[-1].resident
        if slope(values) > length.slope or last > 1.02 * first:
            found.append(f"{name}: {first} to {last} bytes, {slope(values):.0f} a step")
    return found


LENGTHS = [
    pytest.param(SHORT, id="short", marks=pytest.mark.long),
    pytest.param(LONG, id="long", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.usefixtures("own_forks")
def test_nothing_grows_over_many_steps(job: JobFolder, length: Length) -> None:
    seen = watch(job, length, leak=0)
    assert growing(seen, length) == []
    for name, values in seen.items():
        assert values[-1].descriptors == values[0].descriptors, name


@pytest.mark.long
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.usefixtures("own_forks")
def test_a_leak_is_found(job: JobFolder, length: Length) -> None:
    found = growing(watch(job, length, leak=length.leak), length)
    assert [name.split()[0] for name in found] == ["rpcmp.worker"]
