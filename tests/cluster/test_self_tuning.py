"""A run that tries other schedule options has the bits of one that does not, faults or not."""

from __future__ import annotations

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
    found, *_ = [event for event in tried.events if event["event"] == "schedule"]
    assert len(found["measured"]) > 1
    assert found["chosen"] in found["measured"]
    given = f'{JOB}\nschedule = "1f1b"\nmax_in_flight = 2'
    fixed = drive(Faults(job).config(given, stages=2, sections=DATA), *slow)
    assert committed(tried) == committed(fixed)
    assert not [event for event in fixed.events if event["event"] == "schedule"]
