"""Replicas lost in every phase and in every way; see tests/cluster/test_replicas.py."""

from __future__ import annotations

import pytest

from tests.support.faults import STEP, Faults, committed, drive
from tests.support.processes import JobFolder, rpcmp
from tests.support.replicated import MIDDLE, PIPELINES, committed_without_fault, replicated

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, str]], str]:
    """Losses and parameters of the job without a fault."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "exception", "cut"])
@pytest.mark.parametrize("phase", ["join", "forward", "optimizer", "saving"])
def test_losing_a_replica_changes_no_bit(
    job: JobFolder,
    fault_free: tuple[list[tuple[int, str]], str],
    namespace: tuple[str, ...],
    phase: str,
    how: str,
) -> None:
    faults = Faults(job).fail_at(MIDDLE, 0 if phase == "join" else STEP, how, phase)
    result = drive(
        replicated(faults), "--set", "recovery.heartbeat_timeout=2.0", under=namespace, timeout=90
    )
    assert committed(result) == fault_free
    assert len([event for event in result.events if event["event"] == "recovered"]) == 1
    assert not [
        event for event in result.events if event["event"] == "resumed"
    ]  # no checkpoint was read


def test_settings_are_measured_with_replicas_too(job: JobFolder) -> None:
    result = rpcmp("tune", job.config(PIPELINES), "--json")
    assert result.code == 0, result.err
