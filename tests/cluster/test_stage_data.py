"""Data at the stages on real workers: the driver draws, stages load, and some of them die."""

from __future__ import annotations

import platform

import pytest

from rpcmp.config import loader
from tests.support.faults import committed
from tests.support.localgroup import local_group
from tests.support.processes import JobFolder
from tests.support.stagedata import built, config, drive, evaluations, require_same_if_one_dies

READERS = 2  # the first stage and the last


@pytest.mark.cluster
def test_stages_that_load_samples_and_are_killed_give_the_same_bits(
    job: JobFolder,
) -> None:
    with local_group(loader.load_config(config(job, "driver"), ["steps=10"])) as local:
        local.train(evaluate=True)
        sent = local.committed()
    loaded = drive(config(job, "stage", mortal=True), "data.num_workers=2")
    assert committed(loaded) == sent
    assert evaluations(loaded.events) == evaluations(local.events)
    assert len(evaluations(loaded.events)) == 2
    (fault,) = [event for event in loaded.events if event["event"] == "fault"]
    assert "'first'" in fault["error"]
    # The driver has built no dataset, so it has sent no sample.
    datasets, num_workers, generations = 2, 2, 2
    expected = datasets * num_workers * READERS * generations
    assert built(job, "stage") == {"rpcmp.data.batches": expected}


@pytest.mark.cluster
def test_replicas_that_load_samples_and_are_killed_give_the_same_bits(
    job: JobFolder,
) -> None:
    settings = ["num_microbatches=3", "microbatches_per_message=2"]  # one replica has no samples
    require_same_if_one_dies(job, settings)


def test_each_dataset_is_built_only_where_it_is_read(job: JobFolder) -> None:
    result = drive(config(job, "driver"), "steps=1")
    assert result.code == 0, result.err
    assert built(job, "driver") == {"rpcmp.driver": 2}


def test_missing_data_on_a_host_fails_before_the_first_step(job: JobFolder) -> None:
    result = drive(config(job, "stage", path="/nowhere/images"))
    assert result.code == 2
    assert "step" not in {event["event"] for event in result.events}
    assert f"failed in build: on {platform.node()}: data.train = 'noisy:Noisy'" in result.err
    assert "No such file or directory: '/nowhere/images'" in result.err
