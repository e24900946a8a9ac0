"""What the command says of checkpoints that a failed run has left.

What the next run does with them is in tests/controlplane/test_checkpoints.py.
"""

from __future__ import annotations

import pytest

from tests.support.leftovers import BODY, Failed
from tests.support.processes import JobFolder, rpcmp


@pytest.mark.cluster
def test_a_checkpoint_of_another_run_is_never_offered(job: JobFolder) -> None:
    failed = Failed(job)
    failed.age(seconds=2)
    ended = rpcmp("drive", failed.config, "--set", "data.train.kwargs.at=0")
    assert ended.code == 1
    assert "--resume" not in ended.err.partition("try:")[2]
    again = rpcmp("drive", failed.config)
    assert "--resume" in again.err.partition("try:")[2]


def test_resume_and_fresh_together_are_refused(job: JobFolder) -> None:
    both = rpcmp("drive", job.config(BODY), "--resume", "--fresh")
    assert both.code == 2
    assert "give one of them" in both.err
