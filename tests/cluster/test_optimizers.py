"""Other optimizers and parameter groups: recovery from lost workers, and resuming."""

from __future__ import annotations

import pytest

from tests.support.optimizedjobs import require_recovery_and_resume
from tests.support.processes import JobFolder


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["MyOpt", "groups"])
def test_a_run_that_loses_a_worker_ends_with_the_bits_of_one_process_and_is_resumed(
    job: JobFolder, name: str
) -> None:
    require_recovery_and_resume(job, name)
