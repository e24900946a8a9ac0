"""A run that tries other schedule options has the bits of one that does not, faults or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpcmp.errors import StageError
from tests.support import rebalanced
from tests.support.alone import committed_alone
from tests.support.faults import Faults, assert_recovered, committed, drive
from tests.support.processes import JobFolder, Result

JOB = "steps = 40\nmicrobatches_per_message = 1"
DATA = """
    [data]
    train = { callable = "zoo:regression", kwargs = { samples = 640 } }
    batch_size = 16
"""
SLOW = '''
"""The layers of `faults`, with backwards that take so long that another schedule promises much."""

import time

import torch
from torch import nn

import faults


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.008)
        return gradient


class Slow(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return Sleep.apply(self.layer(x))


def layers(**kwargs):
    made = faults.layers(**kwargs)
    return [(name, lambda make=make: Slow(make())) for name, make in made]
'''


def test_trying_other_options_changes_no_bit_and_survives_a_fault(job: JobFolder) -> None:
    (job.folder / "slow.py").write_text(SLOW)
    faults = Faults(job).fail_at(1, 30, "SIGKILL", "forward")
    slow = "model.layers=slow:layers"
    tried = drive(faults.config(JOB, stages=2, sections=DATA), "--set", slow)
    assert_recovered(faults, tried)
    # The last step before the fault has no report of the stage that was lost.
    steps = [each["core_seconds"] for each in tried.events if each.get("busy")]
    assert len(steps) > 35
    assert all(each[stage]["used"] > 0 for each in steps for stage in ("stage0", "stage1"))
    found, *_ = of_kind(tried, "schedule")
    assert len(found["measured"]) > 1
    assert found["chosen"] in found["measured"]
    config = Faults(job).config(JOB, stages=2, sections=DATA)
    assert committed(tried) == committed_alone(config, slow)


SMALL = '''
"""The layers of `faults`, of which the first has no memory for more than some micro-batches."""

import pathlib

import torch
from torch import nn

import faults

held = 0


class Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        global held
        held -= 1
        return gradient


class Small(nn.Module):
    def __init__(self, layer, most):
        super().__init__()
        self.layer, self.most = layer, most

    def forward(self, x):
        global held
        held += self.training
        if held > self.most:
            raise MemoryError("out of memory")
        return Count.apply(self.layer(x))


def layers(limit, **kwargs):
    (name, make), *others = faults.layers(**kwargs)
    most = int(pathlib.Path(limit).read_text())
    return [(name, lambda: Small(make(), most)), *others]
'''
PREDICTED = {"microbatches_per_message": 2}
"""With two stages the first then holds four micro-batches, not two."""


def small_job(job: JobFolder, text: str, sections: str = "") -> tuple[Path, Path]:
    """Return a config, and the file that says how many micro-batches its first layer can hold."""
    (job.folder / "small.py").write_text(SMALL)
    limit = job.folder / "limit"
    config = Faults(job).config(text, stages=2, sections=sections)
    changed = config.read_text().replace("faults:layers", "small:layers")
    config.write_text(changed.replace("[model.kwargs]", f'[model.kwargs]\nlimit = "{limit}"'))
    return config, limit


def of_kind(result: Result, kind: str) -> list[dict[str, Any]]:
    return [event for event in result.events if event["event"] == kind]


@pytest.mark.cluster
def test_a_run_leaves_predicted_options_that_its_first_step_has_no_memory_for(
    job: JobFolder,
) -> None:
    config, limit = small_job(job, "steps = 4")
    limit.write_text("2")
    found = rebalanced.train(config, {}, predicted=PREDICTED)
    (fault,) = of_kind(found, "fault")
    assert fault["stage"] == "stage0"
    assert "out of memory" in fault["error"]
    first, then = of_kind(found, "schedule")
    assert (first["step"], first["microbatches_per_message"]) == (0, 2)
    assert (then["step"], then["microbatches_per_message"]) == (0, 1)
    limit.write_text("4")
    assert committed(found) == committed_alone(config)
    limit.write_text("1")
    with pytest.raises(StageError, match="out of memory"):
        rebalanced.train(config, {}, predicted=PREDICTED)


@pytest.mark.cluster
def test_a_run_leaves_found_options_if_it_resumes_where_there_is_less_memory(
    job: JobFolder,
) -> None:
    config, limit = small_job(job, "steps = 14", '[checkpoint]\ndir = "saved"\nevery_steps = 100')
    limit.write_text("4")
    before = rebalanced.train(config, {}, predicted=PREDICTED)
    assert all(event["microbatches_per_message"] == 2 for event in of_kind(before, "schedule"))
    limit.write_text("2")
    longer = ("--set", "steps=20")
    resumed = drive(config, "--resume", *longer)
    assert resumed.code == 0, resumed.err
    first, then, *_ = of_kind(resumed, "schedule")
    assert [each["microbatches_per_message"] for each in (first, then)] == [2, 1]
    assert len(of_kind(resumed, "fault")) == 1
    limit.write_text("4")
    steps, parameters = committed_alone(config, *longer[1:])
    assert committed(resumed) == (steps[14:], parameters)
