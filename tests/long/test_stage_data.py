"""Stages that load their samples; see tests/cluster/test_stage_data.py."""

from __future__ import annotations

import pytest

from rpcmp import configfile
from tests.support.faults import committed
from tests.support.localgroup import local_group
from tests.support.processes import JobFolder, rpcmp
from tests.support.stagedata import built, config, drive, evaluations

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["num_microbatches=3"], id="all have some"),
        pytest.param(["num_microbatches=1"], id="only one has any"),
    ],
)
def test_replicas_that_load_their_samples_and_die_train_as_if_the_driver_sent_them(
    job: JobFolder, settings: list[str]
) -> None:
    """Two of the first stage and three of the last; one of them dies."""
    settings = ["stages.0.replicas=2", "stages.2.replicas=3", *settings]
    with local_group(configfile.load(config(job, "driver"), ["steps=10", *settings])) as local:
        local.train(evaluate=True)
        sent = [(event["step"], event["loss"].hex()) for event in local.of("step")]
        expected = sent, local.group.parameters_sha256()
    loaded = drive(config(job, "stage", mortal=True), *settings)
    assert committed(loaded) == expected
    assert evaluations(loaded.events) == evaluations(local.events)
    assert [event["event"] for event in loaded.events].count("fault") == 1
    datasets, readers, generations = 2, 2 + 3, 2
    assert built(job, "stage") == {"rpcmp.data": datasets * readers * generations}


def test_a_sample_that_cannot_be_loaded_is_tried_again_once(job: JobFolder) -> None:
    result = drive(config(job, "stage", bad=22))  # which is none of data.test
    assert result.code == 1
    assert [event["event"] for event in result.events].count("fault") == 1
    assert "failed in data at step 3: ValueError: sample 22 is broken" in result.err


def test_settings_change_while_stages_load(job: JobFolder) -> None:
    config_file = config(job, "stage")
    result = rpcmp("tune", config_file, "--microbatches", "1,3", "--schedules", "1f1b")
    assert result.code == 0, result.err
    assert "best:" in result.out
