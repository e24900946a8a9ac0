"""A run that tries other schedule options has the bits of one that does not, faults or not."""

from __future__ import annotations

import pytest

from rpcmp.errors import StageError
from tests.support import rebalanced
from tests.support.faults import Faults, assert_recovered, committed, drive
from tests.support.processes import JobFolder

JOB = "steps = 90\nmicrobatches_per_message = 1"
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
    faults = Faults(job).fail_at(1, 70, "forward", "SIGKILL")
    slow = "--set", "model.layers=slow:layers"
    tried = drive(faults.config(JOB, stages=2, sections=DATA), *slow)
    assert_recovered(faults, tried)
    # The last step before the fault has no report of the stage that was lost.
    steps = [each["core_seconds"] for each in tried.events if each.get("busy")]
    assert len(steps) > 80
    assert all(each[stage]["used"] > 0 for each in steps for stage in ("stage0", "stage1"))
    found, *_ = [event for event in tried.events if event["event"] == "schedule"]
    assert len(found["measured"]) > 1
    assert found["chosen"] in found["measured"]
    given = f'{JOB}\nschedule = "1f1b"\nmax_in_flight = 2'
    fixed = drive(Faults(job).config(given, stages=2, sections=DATA), *slow)
    assert committed(tried) == committed(fixed)
    assert not [event for event in fixed.events if event["event"] == "schedule"]


SMALL = '''
"""The layers of `faults`, of which the first has no memory for more than some micro-batches."""

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
        held += 1
        if held > self.most:
            raise MemoryError("out of memory")
        return Count.apply(self.layer(x))


def layers(most, **kwargs):
    (name, make), *others = faults.layers(**kwargs)
    return [(name, lambda: Small(make(), most)), *others]
'''
PREDICTED = {"microbatches_per_message": 2}
"""With two stages the first then holds four micro-batches, not two."""


def test_a_run_leaves_predicted_options_that_its_first_step_has_no_memory_for(
    job: JobFolder,
) -> None:
    (job.folder / "small.py").write_text(SMALL)
    config = Faults(job).config("steps = 4", stages=2)
    small = "model.layers=small:layers"
    found = rebalanced.train(config, {}, small, "model.kwargs.most=2", predicted=PREDICTED)
    assert found.code == 0
    (fault,) = [event for event in found.events if event["event"] == "fault"]
    assert fault["stage"] == "stage0"
    assert "out of memory" in fault["error"]
    first, then = [event for event in found.events if event["event"] == "schedule"]
    assert (first["step"], first["microbatches_per_message"]) == (0, 2)
    assert (then["step"], then["microbatches_per_message"]) == (0, 1)
    plain = rebalanced.train(config, {}, small, "model.kwargs.most=4")
    assert committed(found) == committed(plain)
    with pytest.raises(StageError, match="out of memory"):
        rebalanced.train(config, {}, small, "model.kwargs.most=1", predicted=PREDICTED)
