"""A best step lost while it is saved; runs that stopped early; see tests/cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.evaluatedjobs import BEST, FAST, LAST, SECTIONS, config, decided
from tests.support.faults import Faults, committed, drive
from tests.support.processes import JobFolder
from tests.support.runs import checkpoints_in

pytestmark = pytest.mark.long


@pytest.mark.parametrize("evaluated", ["evaluate_every_steps = 2", "evaluate_every = 1"])
def test_a_fault_while_saving_the_best_step_changes_no_bit(
    job: JobFolder, tmp_path: Path, evaluated: str
) -> None:
    """No snapshot of these steps is kept: the best is copied after its evaluation."""
    rare = ("--set", "recovery.mirror_every_steps=3", "--set", "checkpoint.every_steps=100")
    whole = Faults(JobFolder(tmp_path / "whole"))
    text = f"steps = 40\n{evaluated}"
    expected = drive(whole.config(text, stages=2, sections=SECTIONS), *FAST, *rare)
    best = expected.event("summary")["best"]["step"]
    assert best % 3
    faults = Faults(job).fail_at(1, best, "SIGKILL", "saving")
    result = drive(faults.config(text, stages=2, sections=SECTIONS), *FAST, *rare)
    assert len(faults.triggered) == 1
    assert committed(result) == committed(expected)
    assert decided(result) == decided(expected)
    assert checkpoints_in(job.folder / "saved").path_of(best).is_dir()


def test_a_run_stopped_early_resumes_only_with_more_patience(job: JobFolder) -> None:
    path = config(Faults(job))
    first = drive(path, *FAST)
    again = drive(path, "--resume", *FAST)
    assert (again.code, again.losses) == (0, [])
    assert decided(again)[1:] == decided(first)[1:]
    patient = drive(path, "--resume", *FAST, "--set", "early_stopping.patience=3")
    assert patient.code == 0
    assert patient.event("resumed")["changed"] == ["early_stopping.patience"]
    assert patient.event("early_stop")["step"] == LAST + 2
    assert patient.event("summary")["best"]["step"] == BEST
