"""A run that loses something goes on by itself and ends with the bits of one that has not.

`pytest -m long` runs the whole matrix, {how} x {phase} x {stage}; some of its cells run always.
"""

from __future__ import annotations

import itertools
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.faults import HOWS, PHASES, STEP, Faults, committed, drive
from tests.processes import JobFolder, Result

ALWAYS = {
    ("SIGKILL", "saving", 0),
    ("SIGSTOP", "backward", 1),
    ("SIGSEGV", "optimizer", 2),
    ("exception", "forward", 1),
    ("deadlock", "joining", 2),
    ("cut", "backward", 0),
}
"""Cells of the matrix that the short suite runs: every way to fail, every phase, every stage."""

FIRST, MIDDLE, LAST = 0, 1, 2

Committed = tuple[list[tuple[int, str]], str]


def cells() -> Iterator[object]:
    """The matrix; what is not in ALWAYS is long."""
    for cell in itertools.product(HOWS, PHASES, (FIRST, MIDDLE, LAST)):
        marks = [] if cell in ALWAYS else [pytest.mark.long]
        yield pytest.param(*cell, marks=marks, id="-".join(map(str, cell)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Losses and parameters of the same job without a fault."""
    job = JobFolder(tmp_path_factory.mktemp("undisturbed") / "job")
    return committed(drive(Faults(job).config()))


@pytest.fixture
def namespace() -> Iterator[tuple[str, ...]]:
    """A command that runs another in a network namespace of its own, where links can be cut."""
    name = f"rpcmp-{uuid.uuid4().hex[:8]}"
    inside = ("ip", "netns", "exec", name)
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for command in (
            ["ip", "link", "set", "lo", "up"],
            ["ip", "rule", "add", "pref", "10", "lookup", "local"],  # so that rules can precede it
            ["ip", "rule", "del", "pref", "0"],
        ):
            subprocess.run([*inside, *command], check=True)
        yield inside
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def recovered_once(faults: Faults, result: Result) -> None:
    """One process was hit, in the phase that was planned, and one more generation was formed."""
    (planned,), (struck,) = faults.planned, faults.struck
    assert [struck[key] for key in ("stage", "phase", "step")] == planned
    (fault,) = [event for event in result.events if event["event"] == "fault"]
    (recovered,) = [event for event in result.events if event["event"] == "recovered"]
    assert fault["generation"] == 1
    assert recovered["generation"] == 2
    assert fault["step"] - recovered["step"] <= 1  # at most one step that was told is done again


@pytest.mark.parametrize(("how", "phase", "stage"), list(cells()))
def test_every_fault_in_every_phase_is_recovered_from(
    job: JobFolder,
    undisturbed: Committed,
    namespace: tuple[str, ...],
    how: str,
    phase: str,
    stage: int,
) -> None:
    faults = Faults(job).fail_at(stage, 0 if phase == "joining" else STEP, phase, how)
    result = drive(
        faults.config(), "--set", "recovery.heartbeat_timeout=2.0", under=namespace, timeout=90
    )
    assert committed(result) == undisturbed
    recovered_once(faults, result)
