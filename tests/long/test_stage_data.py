"""Stages that load their samples; see tests/cluster/test_stage_data.py."""

from __future__ import annotations

import pytest

from tests.support.processes import JobFolder, rpcmp
from tests.support.stagedata import config, drive, require_same_if_one_dies

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["num_microbatches=3"], id="all have some"),
        pytest.param(["num_microbatches=1"], id="only one has any"),
    ],
)
def test_replicas_that_load_samples_and_are_killed_give_the_same_bits(
    job: JobFolder, settings: list[str]
) -> None:
    require_same_if_one_dies(job, settings)


def test_a_sample_that_fails_to_load_is_retried_once(job: JobFolder) -> None:
    result = drive(config(job, "stage", bad=22))  # not a sample of data.test
    assert result.code == 1
    assert [event["event"] for event in result.events].count("fault") == 1
    assert "failed in data at step 3: ValueError: sample 22 is broken" in result.err


def test_settings_change_while_stages_load(job: JobFolder) -> None:
    config_file = config(job, "stage")
    result = rpcmp("tune", config_file, "--microbatches", "1,3", "--schedules", "1f1b")
    assert result.code == 0, result.err
    assert "best:" in result.out
