"""Compiled layers that take minutes to compile."""

from __future__ import annotations

import pytest

from tests.support.faults import Faults, committed, drive
from tests.support.processes import JobFolder, rpcmp

pytestmark = pytest.mark.long


def test_a_fault_does_not_change_what_is_computed(job: JobFolder) -> None:
    text = "compile = true\nsteps = 4"
    expected = committed(drive(Faults(job).config(text, stages=2)))
    faults = Faults(job).fail_at(0, 3, "SIGKILL", "backward")
    assert committed(drive(faults.config(text, stages=2))) == expected
    assert len(faults.triggered) == 1


def test_one_stage_may_compile_alone(job: JobFolder) -> None:
    config = job.config("""
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        [[stages]]
        compile = true
        [[stages]]
    """)
    proved = rpcmp("verify", config, "--steps", "2")
    assert "identical: 2 losses" in proved.out, proved.err


def test_a_module_that_was_cut_is_compiled(job: JobFolder) -> None:
    config = job.config("""
        loss = "rpcmp.losses:masked_lm"
        num_microbatches = 2
        compile = true
        [model]
        module = "unsplit:Language"
        balance = [1, 3, 1]
        [data]
        train = "unsplit:sentences"
        batch_size = 8
    """)
    proved = rpcmp("verify", config, "--steps", "2")
    assert "identical: 2 losses" in proved.out, proved.err
