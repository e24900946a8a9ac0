"""`[data] at = "stage"`: the driver draws, the stages load, and no bit is another."""

from __future__ import annotations

import json
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import committed
from tests.support.processes import JobFolder, Result, rpcmp

READERS = 2  # the first stage and the last


def config(job: JobFolder, at: str, mortal: bool = False, **more: Any) -> Path:
    """Three stages, of which the one in the middle reads nothing of the batch."""
    kwargs = {"witness": str(job.folder / at), **more}
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in kwargs.items())
    return job.config(
        f"""
        epochs = 3
        num_microbatches = 3
        evaluate_every = 2
        [metrics]
        error = "zoo:error"
        worst = "noisy:Worst"
        [[stages]]
        name = "first"
        module = "noisy:Mortal"
        kwargs = {{ marker = {str(job.folder / "died") if mortal else ""!r} }}
        inputs = ["input.0", "input.1.noise"]
        [[stages]]
        name = "middle"
        module = "zoo:Encoder"
        [[stages]]
        name = "last"
        module = "noisy:Head"
        inputs = ["middle", "input"]
        [data]
        train = {{ callable = "noisy:Noisy", kwargs = {{ {given} }} }}
        test = {{ callable = "noisy:Noisy", kwargs = {{ {given}, samples = 13 }} }}
        batch_size = 7
        at = "{at}"
        """.replace("steps = 2", ""),
        f"{at}.toml",
    )


def drive(config: Path, *settings: str) -> Result:
    """Run the job to its end."""
    options = [part for setting in settings for part in ("--set", setting)]
    return rpcmp("drive", config, "--json", "--steps", "10", *options)


def built(job: JobFolder, at: str) -> Counter[str]:
    """Where the datasets were built, and how often."""
    return Counter((job.folder / at).read_text().split())


def evaluations(result: Result) -> list[tuple[Any, ...]]:
    """What was evaluated when, to the last bit."""
    found = [event for event in result.events if event["event"] == "eval"]
    return [(event["step"], event["loss"], event["error"], event["worst"]) for event in found]


def test_stages_that_load_their_samples_and_die_train_as_if_the_driver_sent_them(
    job: JobFolder,
) -> None:
    sent = drive(config(job, "driver"))
    loaded = drive(config(job, "stage", mortal=True), "data.num_workers=2")
    assert committed(loaded) == committed(sent)
    assert evaluations(loaded) == evaluations(sent)
    assert len(evaluations(loaded)) == 2
    (fault,) = [event for event in loaded.events if event["event"] == "fault"]
    assert "'first'" in fault["error"]
    # The driver, which has built none, can have sent no sample.
    datasets, num_workers, generations = 2, 2, 2
    expected = datasets * num_workers * READERS * generations
    assert built(job, "stage") == {"rpcmp.data": expected}
    assert built(job, "driver") == {"rpcmp.driver": datasets}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["num_microbatches=3"], id="all have some", marks=pytest.mark.long),
        pytest.param(["num_microbatches=3", "microbatches_per_message=2"], id="one has none"),
        pytest.param(["num_microbatches=1"], id="only one has any", marks=pytest.mark.long),
    ],
)
def test_replicas_that_load_their_samples_train_as_if_the_driver_sent_them(
    job: JobFolder, settings: list[str]
) -> None:
    """Two of the first stage and three of the last; one of them dies."""
    replicas = ["stages.0.replicas=2", "stages.2.replicas=3"]
    sent = drive(config(job, "driver"), *replicas, *settings)
    loaded = drive(config(job, "stage", mortal=True), *replicas, *settings)
    assert committed(loaded) == committed(sent)
    assert evaluations(loaded) == evaluations(sent)
    assert [event["event"] for event in loaded.events].count("fault") == 1
    datasets, readers, generations = 2, 2 + 3, 2
    assert built(job, "stage") == {"rpcmp.data": datasets * readers * generations}


def test_data_that_a_host_does_not_have_ends_the_job_before_a_step(job: JobFolder) -> None:
    result = drive(config(job, "stage", path="/nowhere/images"))
    assert result.code == 2
    assert "step" not in {event["event"] for event in result.events}
    assert f"failed in build: on {platform.node()}: data.train = 'noisy:Noisy'" in result.err
    assert "No such file or directory: '/nowhere/images'" in result.err


@pytest.mark.long
def test_hosts_with_other_data_end_the_job_before_a_step(job: JobFolder) -> None:
    result = drive(config(job, "stage", shrinks=True))
    assert result.code == 2
    assert "step" not in {event["event"] for event in result.events}
    assert "data.train has 2" in result.err
    assert "all hosts need the same data" in result.err


@pytest.mark.long
def test_a_sample_that_cannot_be_loaded_is_tried_again_once(job: JobFolder) -> None:
    result = drive(config(job, "stage", bad=11))
    assert result.code == 1
    assert [event["event"] for event in result.events].count("fault") == 1
    assert "failed in data at step 2: ValueError: sample 11 is broken" in result.err


@pytest.mark.long
def test_what_stages_load_is_what_one_process_loads(job: JobFolder) -> None:
    result = rpcmp("verify", config(job, "stage"), "--steps", "10")
    assert result.code == 0, result.err
    assert result.out.startswith("identical: 10 losses")


@pytest.mark.long
def test_settings_change_while_stages_load(job: JobFolder) -> None:
    config_file = config(job, "stage")
    result = rpcmp("tune", config_file, "--microbatches", "1,3", "--schedules", "1f1b")
    assert result.code == 0, result.err
    assert "best:" in result.out
