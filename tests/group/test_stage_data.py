"""Data at the stages: the driver draws indices, the stages load samples, the bits are the same."""

from __future__ import annotations

import pytest

from rpcmp.config import loader
from rpcmp.errors import ConfigError
from tests.support.localgroup import local_group, require_same_bits
from tests.support.processes import JobFolder
from tests.support.stagedata import config, evaluations

REPLICAS = ["stages.0.replicas=2", "stages.2.replicas=3"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([], id="without replicas"),
        pytest.param([*REPLICAS, "num_microbatches=3"], id="all have some"),
        pytest.param(
            [*REPLICAS, "num_microbatches=3", "microbatches_per_message=2"], id="one has none"
        ),
        pytest.param([*REPLICAS, "num_microbatches=1"], id="only one has any"),
    ],
)
def test_stages_that_load_samples_give_the_same_bits(job: JobFolder, settings: list[str]) -> None:
    found = []
    for at in ("driver", "stage"):
        with local_group(loader.load_config(config(job, at), ["steps=10", *settings])) as local:
            losses = local.train(evaluate=True).losses
            found.append((losses, local.group.parameters_sha256(), evaluations(local.events)))
    assert found[0] == found[1]
    assert (len(found[0][0]), len(found[0][2])) == (10, 2)


def test_stages_load_the_samples_of_one_process(job: JobFolder) -> None:
    found = require_same_bits(loader.load_config(config(job, "stage"), ["steps=10"]))
    assert len(found.losses) == 10


def test_hosts_with_different_data_fail_before_the_first_step(job: JobFolder) -> None:
    other = loader.load_config(config(job, "stage", shrinks=True), ["steps=10"])
    with local_group(other) as local, pytest.raises(ConfigError) as refused:
        local.train()
    assert not local.of("step")
    assert "data.train has 2" in str(refused.value)
    assert "all hosts need the same data" in str(refused.value)
