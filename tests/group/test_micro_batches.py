"""The bits of unusual mini-batches: short, merged, sampled, collated, and dicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from tests.support.localgroup import local_group, require_same_bits
from tests.support.processes import JobFolder
from tests.support.samplekinds import MADE, PADDED

NORMALIZED = """
steps = 4
[model]
layers = "zoo:mlp"
balance = [2, 2]
[data]
train = { callable = "zoo:regression", kwargs = { samples = SAMPLES } }
batch_size = 8
"""

AT = pytest.mark.parametrize("at", ["driver", "stage"])


def normalized(job: JobFolder, samples: int, *overrides: str) -> Config:
    """Return a job with batch normalization; 8 samples per mini-batch, in 4 micro-batches."""
    return loader.load_config(job.config(NORMALIZED.replace("SAMPLES", str(samples))), overrides)


def refused(config: Config) -> str:
    """Return the error of a run before its first step."""
    with local_group(config) as local:
        with pytest.raises(ConfigError) as raised:
            local.train()
        assert not local.of("step")
    return str(raised.value)


def require_trains(config: Config) -> None:
    with local_group(config) as local:
        assert len(local.train().losses) == config.steps


@pytest.mark.parametrize("samples", [11, 13, 15])
def test_the_last_mini_batch_has_the_bits_of_one_process(job: JobFolder, samples: int) -> None:
    """The last mini-batch has 3, 5 or 7 samples for 4 micro-batches that need 2 samples each."""
    assert len(require_same_bits(normalized(job, samples)).losses) == 4


@AT
def test_a_mini_batch_that_is_too_small_is_refused_before_the_first_step(
    job: JobFolder, at: str
) -> None:
    assert (
        "the last mini-batch of an epoch has 1 sample (data.batch_size = 8), and a micro-batch "
        "needs 2, since stage 'stage0' trains batch normalization: set data.drop_last = true, or "
        "change data.batch_size, or set data.min_microbatch = 1"
    ) in refused(normalized(job, 9, f"data.at={at}"))
    for mends in ("data.drop_last=true", "data.batch_size=7", "steps=1"):
        require_trains(normalized(job, 9, f"data.at={at}", mends))


@AT
def test_mini_batches_of_one_sample_are_refused_in_a_run_of_less_than_an_epoch(
    job: JobFolder, at: str
) -> None:
    assert (
        "each mini-batch of an epoch has 1 sample (data.batch_size = 1), and a micro-batch needs "
        "2, since stage 'stage0' trains batch normalization: raise data.batch_size"
    ) in refused(normalized(job, 9, "data.batch_size=1", f"data.at={at}"))


def test_batch_normalization_refuses_one_sample_unless_the_config_allows_it(
    job: JobFolder,
) -> None:
    """Otherwise a single value per channel would fail after a whole epoch."""
    path = job.config(
        NORMALIZED.replace("SAMPLES", "17").replace("zoo:mlp", "zoo:cnn").replace("2, 2", "3, 3")
    )
    message = refused(loader.load_config(path))
    assert "the last mini-batch of an epoch has 1 sample" in message
    assert "its maps have more than one value per channel" in message
    require_same_bits(loader.load_config(path, ["data.min_microbatch=1"]))


def test_fewer_micro_batches_and_idle_replicas_are_reported(
    job: JobFolder,
) -> None:
    replicated = NORMALIZED.replace("[data]", "[[stages]]\nreplicas = 3\n[[stages]]\n[data]")
    path = job.config(replicated.replace("SAMPLES", "8"))
    with local_group(loader.load_config(path, ["data.batch_size=4"])) as local:
        assert len(local.train().losses) == 4
        fewer, idle = [event["text"] for event in local.of("warning")]
    assert fewer.startswith("4 samples make 2 micro-batches of at least 2, and not 4")
    assert idle == (
        "stage 'stage0': replica 2 will have nothing to do, since a step has only 2 micro-batches; "
        "raise data.batch_size"
    )


def test_the_config_may_lower_the_number_of_samples_that_suffice(job: JobFolder) -> None:
    with pytest.raises(ConfigError, match="min_microbatch = 9 is more than batch_size = 8"):
        normalized(job, 16, "data.min_microbatch=9")
    three = "data.min_microbatch=3"
    message = refused(normalized(job, 16, three, "data.batch_size=7", "steps=3"))
    assert "a micro-batch needs 3, as data.min_microbatch says" in message
    require_same_bits(normalized(job, 16, three, "steps=2"))


@AT
@pytest.mark.parametrize("name", MADE)
def test_samples_of_every_kind_have_the_bits_of_one_process(
    job: JobFolder, name: str, at: str
) -> None:
    text = MADE[name].replace("[data]", f'[data]\nbatch_size = 7\nat = "{at}"')
    assert len(require_same_bits(loader.load_config(job.config(f"steps = 9\n{text}"))).losses) == 9


@AT
def test_a_run_with_a_sampler_resumes_in_the_middle_of_an_epoch(
    job: JobFolder, tmp_path: Path, at: str
) -> None:
    text = PADDED.replace("[data]", f'[data]\nbatch_size = 7\nat = "{at}"')
    path = job.config("steps = 12\n" + text)
    with local_group(loader.load_config(path)) as local:
        whole = local.train()
    with local_group(loader.load_config(path, ["steps=8"])) as local:
        local.train()
        saved = local.save(tmp_path / "kept")
    assert (saved.progress.epoch, saved.progress.batch) == (2, 2)  # of six
    with local_group(loader.load_config(path), saved) as local:
        resumed = local.train()
    assert resumed.losses == whole.losses[8:]
    assert all(torch.equal(resumed.state[name], value) for name, value in whole.state.items())


@AT
@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("samples:Forgetful", "orders the same epoch differently when it is asked again"),
        ("samples:whole_batches", "indices of samples, here from 0 to 49, one by one"),
        ("samples:mapped_loss", "data.sampler = 'samples:mapped_loss' failed"),
        ("samples:missing", "data.sampler"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_refused_before_the_first_step(
    job: JobFolder, at: str, sampler: str, message: str
) -> None:
    config = normalized(job, 50, f"data.sampler={sampler}", f"data.at={at}")
    with pytest.raises(ConfigError, match=message), local_group(config) as local:
        local.train()
