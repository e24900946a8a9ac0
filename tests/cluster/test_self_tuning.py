"""A run that tries other schedule options has the bits of one that does not, faults or not."""

from __future__ import annotations

from tests.support.faults import Faults, assert_recovered, committed, drive
from tests.support.processes import JobFolder

JOB = """
    steps = 130
    num_microbatches = 8
    schedule = "1f1b"
    max_in_flight = 16
"""
DATA = """
    [data]
    train = { callable = "zoo:regression", kwargs = { samples = 640 } }
    batch_size = 16
"""


def test_trying_other_options_changes_no_bit_and_survives_a_fault(job: JobFolder) -> None:
    faults = Faults(job).fail_at(1, 110, "forward", "SIGKILL")
    tried = drive(faults.config(JOB, stages=2, sections=DATA))
    assert_recovered(faults, tried)
    found = tried.event("schedule")
    assert len(found["measured"]) > 1
    assert found["chosen"] in found["measured"]
    plain = Faults(job).config(f"{JOB}\nmicrobatches_per_message = 1", stages=2, sections=DATA)
    fixed = drive(plain)
    assert committed(tried) == committed(fixed)
    assert not [event for event in fixed.events if event["event"] == "schedule"]
