"""Every kind of process is struck by every signal at every moment: the run ends with its bits.

Moments of a recovery follow a worker's death. A run whose `drive` was ended is started again.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.support.faults import Committed
from tests.support.strikes import HOWS, MOMENTS, PROCESSES, Strike
from tests.support.trials import Trial, expected_of, run_trial_here

JOB, STEP = "chain", 20

RECOVERY = ("fault", "recovered")

CELLS = [
    (what, how, moment)
    for what, how, moment in itertools.product(PROCESSES, HOWS, MOMENTS)
    if (what, how) != ("drive", "SIGSTOP")  # nobody would continue it
]


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    return expected_of(JOB, tmp_path_factory.mktemp("fault_free"))


@pytest.mark.usefixtures("own_forks")
@pytest.mark.parametrize(("what", "how", "moment"), CELLS)
def test_the_run_survives_every_strike(
    what: str,
    how: str,
    moment: str,
    token: str,
    fault_free: Committed,
    tmp_path: Path,
) -> None:
    strikes = [Strike(what, how, 1, moment, STEP, 0.05, 3.0)]
    if moment in RECOVERY:
        strikes.append(Strike("worker", "SIGKILL", at=STEP))
    trial = Trial(JOB, "here", True, tuple(strikes))
    run_trial_here(trial, fault_free, tmp_path)
