"""Runs that lose a host, slow enough to lose it in time, and checks of their recovery."""

from __future__ import annotations

from pathlib import Path

from tests.support.faults import Committed, Faults, committed
from tests.support.processes import JobFolder, Result, rpcmp

SLOW = 10.0
"""Milliseconds of a forward, so that there is time to lose a host."""

STEPS = 14

LOSING = '"event": "step", "step": 5,'
"""The output line after which a host is lost."""


def slow_config(job: JobFolder, milliseconds: float = SLOW) -> Path:
    """Write the config of a job of two stages."""
    return Faults(job).config(f"steps = {STEPS}", 2, milliseconds)


def committed_without_fault(folder: Path) -> Committed:
    """Return the commits of a run without a loss."""
    return committed(rpcmp("drive", slow_config(JobFolder(folder / "job")), "--json"))


def assert_went_on(result: Result, fault_free: Committed, steps: int = 1) -> None:
    """Check that there is one new generation, the same bits, and at most `steps` repeated steps."""
    assert committed(result) == fault_free
    (recovered,) = [event for event in result.events if event["event"] == "recovered"]
    (fault,) = [event for event in result.events if event["event"] == "fault"]
    assert recovered["generation"] == 2
    assert fault["step"] - recovered["step"] <= steps
