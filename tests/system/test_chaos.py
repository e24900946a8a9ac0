"""Many random faults in one run: the same final bits, no process and no port left behind.

A failure prints its seed; `CHAOS_SEED=n pytest -m system tests/system/test_chaos.py` repeats it.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.chaosjobs import write
from tests.support.faults import HOWS, Committed, Faults, committed, drive
from tests.support.needs import needs
from tests.support.processes import JobFolder
from tests.support.strikes import Strike
from tests.support.trials import Trial, run_trial_here

PHASES = ("forward", "backward", "optimizer", "saving")
STAGES = 3


def plant(faults: Faults, seed: int, count: int, steps: int) -> None:
    """Plant `count` faults all over the run, a few of them while its groups join."""
    draw = random.Random(seed)
    for number in range(count):
        how = draw.choice([*HOWS, "host"])
        stage = draw.randrange(STAGES)
        if number % 10 == 9:
            faults.fail_at(stage, 0, how, "join")
        else:
            faults.fail_at(stage, draw.randrange(2, steps), how, draw.choice(PHASES))


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


def trial(job: str, *strikes: Strike, saves: bool = False) -> Trial:
    return Trial(job, "here", saves, strikes)


FOUND = {
    "the fork server dies while servers start": trial(
        "chain",
        Strike("drive", "SIGKILL", at=13),
        Strike("forks", "SIGABRT", at=13, delay=0.97),
    ),
    "a server dies when the run ends": trial(
        "mixed", Strike("server", "SIGSEGV", moment="summary"), saves=True
    ),
    "a server dies before it serves": trial(
        "graph", Strike("server", "SIGKILL", moment="start"), saves=True
    ),
    "the template dies while servers start": trial(
        "chain", Strike("template", "SIGSEGV", moment="start"), saves=True
    ),
    "the template is stopped while servers start": trial(
        "graph", Strike("template", "SIGSTOP", moment="start")
    ),
    "a server is lost after the template": trial(
        "chain", Strike("template", "SIGKILL", at=13), Strike("server", "SIGKILL", at=20)
    ),
    "the semaphores of loaders are left": trial(
        "replicas", Strike("forks", "SIGSEGV", at=13, delay=0.06), saves=True
    ),
    "a stopped run loses a worker": trial(
        "chain", Strike("drive", "SIGTERM", at=20), Strike("worker", "SIGKILL", 1, at=20)
    ),
    "a worker is stopped before it has its stage": trial(
        "chain", Strike("forks", "SIGKILL", at=20), Strike("worker", "SIGSTOP", 1, "fault")
    ),
    "a stage's loader dies before the stage is built": trial(
        "graph", Strike("loader", "SIGKILL", moment="start")
    ),
    "a loader of the driver may open no more files": trial(
        "replicas", Strike("loader", "files", at=20, delay=0.05, lasts=1.0), saves=True
    ),
    "a stage's loader is stopped": trial("graph", Strike("loader", "SIGSTOP", at=20, delay=0.05)),
    "a loader of the driver is stopped": trial(
        "replicas", Strike("loader", "SIGSTOP", at=20, delay=0.05)
    ),
}
"""What `python -m tests.benchmarks.chaos` has found."""

SHORT = ("--set", "steps=40")
"""Twice as far as the last fault: steps after it show that the run goes on, each at a cost."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Committed]:
    """The steps and parameters of each job without a fault, which is run once."""

    def run(job: str) -> Committed:
        config = write(job, tmp_path_factory.mktemp(job) / "job", saves=False)
        return committed(drive(config, *SHORT))

    return functools.cache(run)


@pytest.fixture
def expected(found: str, undisturbed: Callable[[str], Committed]) -> Committed:
    """What the job of a fault comes to; on shared servers, so before the test has its own."""
    return undisturbed(FOUND[found].job)


@pytest.mark.parametrize("found", FOUND)
def test_what_random_faults_have_found_stays_mended(
    found: str, expected: Committed, own_forks: None, token: str, tmp_path: Path
) -> None:
    aimed = {each.what for each in FOUND[found].strikes}
    for number in range(3):  # on a busy machine what is to be struck may be gone before
        done = run_trial_here(FOUND[found], expected, tmp_path / str(number), *SHORT)
        if {each.what for each in done.struck} == aimed:
            return
    raise AssertionError(f"struck {done.struck} only")
