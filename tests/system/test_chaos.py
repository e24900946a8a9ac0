"""Many random faults in one run: the same final bits, no process and no port left behind.

A failure prints its seed; `CHAOS_SEED=n pytest -m system tests/system/test_chaos.py` repeats it.
"""

from __future__ import annotations

import os
import random
import subprocess

import pytest

from tests.support.faults import HOWS, Faults, committed, drive
from tests.support.needs import needs
from tests.support.processes import JobFolder

PHASES = ("forward", "backward", "optimizer", "saving")
STAGES = 3


def plant(faults: Faults, seed: int, count: int, steps: int) -> None:
    """Plant `count` faults all over the run, a few of them while its groups join."""
    draw = random.Random(seed)
    for number in range(count):
        how = draw.choice([*HOWS, "host"])
        stage = draw.randrange(STAGES)
        if number % 10 == 9:
            faults.fail_at(stage, 0, "joining", how)
        else:
            faults.fail_at(stage, draw.randrange(2, steps), draw.choice(PHASES), how)


@pytest.mark.parametrize(
    ("count", "steps"),
    [(3, 12), pytest.param(50, 120, marks=[pytest.mark.long, pytest.mark.timeout(1500)])],
)
def test_a_run_survives_random_faults(
    job: JobFolder, namespace: tuple[str, ...], count: int, steps: int
) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "4" if count < 10 else str(random.getrandbits(32))))
    print(f"CHAOS_SEED={seed}")
    faults, fault_free = Faults(job), Faults(JobFolder(job.folder.with_name("fault_free")))
    plant(faults, seed, count, steps)
    settings = ["recovery.heartbeat_timeout=2.0", "recovery.max_restarts=20", f"steps={steps}"]
    options = [part for setting in settings for part in ("--set", setting)]
    expected = committed(drive(fault_free.config(), "--set", f"steps={steps}"))
    result = drive(faults.config(), *options, under=namespace, timeout=30 + 25 * count)
    assert committed(result) == expected
    assert len(faults.triggered) == count
    steps_reported = [event["step"] for event in result.events if event["event"] == "step"]
    assert steps_reported == list(range(1, steps + 1))
    listening = subprocess.run(
        [*namespace, needs("ss"), "-tlnH"], capture_output=True, text=True, check=True
    ).stdout
    assert listening == ""
