"""Mini-batches that are not the usual: short, merged, sampled, collated, dicts; all bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler

from rpcmp import data, microbatch
from rpcmp.errors import ConfigError
from rpcmp.sections import DataConfig
from tests.support.faults import committed
from tests.support.processes import JobFolder, rpcmp

NORMALIZED = """
steps = 4
[model]
layers = "zoo:mlp"
balance = [2, 2]
[data]
train = { callable = "zoo:regression", kwargs = { samples = SAMPLES } }
batch_size = 8
"""


def normalized(job: JobFolder, samples: int) -> Path:
    """A job with batch normalization; 8 samples a mini-batch, in 4 micro-batches."""
    return job.config(NORMALIZED.replace("SAMPLES", str(samples)))


@pytest.mark.parametrize(
    ("samples", "count", "smallest", "found"),
    [
        (8, 4, 1, [2, 2, 2, 2]),
        (3, 4, 1, [1, 1, 1]),
        (3, 4, 2, [3]),
        (7, 4, 2, [3, 2, 2]),
        (1, 4, 2, [1]),  # there is no more; whether that is enough is not decided here
        (50, 7, 8, [9, 9, 8, 8, 8, 8]),
    ],
)
def test_micro_batches_are_merged_until_each_has_enough(
    samples: int, count: int, smallest: int, found: list[int]
) -> None:
    assert microbatch.sizes(samples, count, smallest) == found


def test_only_what_is_trained_with_the_batchs_own_statistics_needs_two() -> None:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            super().train(False)
            return self

    needs: list[tuple[Callable[[], nn.Module], int]] = [
        (lambda: nn.Linear(1, 1), 1),
        (lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), 2),
        (lambda: nn.BatchNorm2d(1), 2),
        (lambda: nn.SyncBatchNorm(1), 2),
        (lambda: nn.LazyBatchNorm3d(), 2),
        (lambda: nn.BatchNorm1d(1, track_running_stats=False).eval(), 2),
        (lambda: nn.GroupNorm(1, 1), 1),
        (lambda: nn.InstanceNorm2d(1), 1),  # of one value it fails with any number of samples
        (lambda: Frozen(1).train(), 1),
    ]
    for make, found in needs:
        assert microbatch.smallest_for([nn.Identity(), make()]) == found


@pytest.mark.parametrize("samples", [11, 13, 15])
def test_the_last_mini_batch_has_the_bits_of_one_process(job: JobFolder, samples: int) -> None:
    """3, 5 and 7 samples left for 4 micro-batches, each of which needs 2."""
    proved = rpcmp("verify", normalized(job, samples), "--steps", "4")
    assert proved.code == 0, proved.err


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_a_mini_batch_that_is_too_small_is_refused_before_the_first_step(
    job: JobFolder, at: str
) -> None:
    config = normalized(job, 9)
    refused = rpcmp("drive", config, "--json", "--set", f"data.at={at}")
    assert refused.code == 2
    assert not [event for event in refused.events if event["event"] == "step"]
    assert (
        "the last mini-batch of an epoch has 1 sample (data.batch_size = 8), and a micro-batch "
        "needs 2, since stage 'stage0' trains batch normalization: set data.drop_last = true, or "
        "change data.batch_size, or set data.min_microbatch = 1"
    ) in " ".join(refused.err.split())
    for mends in ("data.drop_last=true", "data.batch_size=7", "steps=1"):
        more = ("--set", mends, "--set", f"data.at={at}")
        assert rpcmp("drive", config, *more).code == 0, mends


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_mini_batches_of_one_sample_are_refused_in_a_run_of_less_than_an_epoch(
    job: JobFolder, at: str
) -> None:
    options = ("--set", "data.batch_size=1", "--set", f"data.at={at}")
    refused = rpcmp("drive", normalized(job, 9), "--json", *options)
    assert refused.code == 2
    assert not [event for event in refused.events if event["event"] in ("step", "fault")]
    assert (
        "each mini-batch of an epoch has 1 sample (data.batch_size = 1), and a micro-batch needs "
        "2, since stage 'stage0' trains batch normalization: raise data.batch_size"
    ) in " ".join(refused.err.split())


def test_batch_normalization_of_maps_is_refused_one_sample_unless_the_config_allows_it(
    job: JobFolder,
) -> None:
    """What a map of one value per channel would fail with, after a whole epoch."""
    config = job.config(
        NORMALIZED.replace("SAMPLES", "17").replace("zoo:mlp", "zoo:cnn").replace("2, 2", "3, 3")
    )
    refused = rpcmp("drive", config, "--json")
    assert refused.code == 2
    assert not [event for event in refused.events if event["event"] == "step"]
    assert "the last mini-batch of an epoch has 1 sample" in refused.err
    assert "its maps have more than one value per channel" in " ".join(refused.err.split())
    allowed = rpcmp("verify", config, "--steps", "4", "--set", "data.min_microbatch=1")
    assert allowed.code == 0, allowed.err


def test_fewer_micro_batches_than_were_asked_for_are_told_and_replicas_without_any(
    job: JobFolder,
) -> None:
    replicated = NORMALIZED.replace("[data]", "[[stages]]\nreplicas = 3\n[[stages]]\n[data]")
    config = job.config(replicated.replace("SAMPLES", "8"))
    ended = rpcmp("drive", config, "--json", "--set", "data.batch_size=4")
    assert ended.code == 0, ended.err
    fewer, idle = [event["text"] for event in ended.events if event["event"] == "warning"]
    assert fewer.startswith("4 samples make 2 micro-batches of at least 2, and not 4")
    assert idle == (
        "stage 'stage0': replica 2 will have nothing to do, since a step has only 2 micro-batches; "
        "raise data.batch_size"
    )


def test_the_config_may_say_how_many_are_enough(job: JobFolder) -> None:
    config = normalized(job, 16)
    wrong = rpcmp("drive", config, "--set", "data.min_microbatch=9")
    assert wrong.code == 2
    assert "min_microbatch = 9 is more than batch_size = 8" in wrong.err
    more = ("--set", "data.min_microbatch=3", "--set", "data.batch_size=7", "--steps", "3")
    wrong = rpcmp("drive", config, *more)
    assert wrong.code == 2
    assert "a micro-batch needs 3, as data.min_microbatch says" in " ".join(wrong.err.split())
    proved = rpcmp("verify", config, "--steps", "2", "--set", "data.min_microbatch=3")
    assert proved.code == 0, proved.err


def of_mapped(loss: str, reads: str) -> str:
    """A job of samples that are mappings; its first stage reads a part of one."""
    return f"""
loss = "{loss}"
[[stages]]
module = "torch.nn:Linear"
kwargs = {{ in_features = 8, out_features = 8 }}
inputs = ["{reads}"]
[[stages]]
module = "torch.nn:Linear"
kwargs = {{ in_features = 8, out_features = 1 }}
[data]
train = "samples:Mapped"
test = "samples:Mapped"
"""


MADE = {
    "dicts": of_mapped("samples:mapped_loss", "input.x"),
    "padded": """
loss = "zoo:token_loss"
[model]
layers = "samples:reading"
balance = [2, 1]
[data]
train = "samples:Texts"
collate = { callable = "samples:padded", kwargs = { value = 0 } }
sampler = { callable = "samples:ByLength", kwargs = { group = 15 } }
""",
    "mappings": of_mapped("tokenized:loss", "input.more.x") + 'collate = "tokenized:collate"',
    "weighted": """
[model]
layers = "zoo:mlp"
balance = [2, 2]
[data]
train = "zoo:regression"
sampler = "samples:weighted"
""",
    "itself": """
[model]
layers = "zoo:mlp"
balance = [2, 2]
[data]
train = { callable = "torch:ones", kwargs = { size = [20, 8] } }
""",
}


TOKENIZED = """
from collections import UserDict
import torch
from torch.utils.data import default_collate

class Encoding(UserDict):
    pass

def collate(samples):
    return Encoding(more=Encoding(default_collate(samples)))

def loss(outputs, batch):
    return torch.nn.functional.mse_loss(outputs, batch["more"]["y"])
"""
"""Mappings that are no dicts, as transformers' tokenizers and collators return them."""


@pytest.mark.parametrize("at", ["driver", "stage"])
@pytest.mark.parametrize("name", MADE)
def test_samples_of_every_kind_have_the_bits_of_one_process(
    job: JobFolder, name: str, at: str
) -> None:
    text = MADE[name].replace("[data]", f'[data]\nbatch_size = 7\nat = "{at}"')
    (job.folder / "tokenized.py").write_text(TOKENIZED)
    config = job.config(f"steps = 9\n{text}")
    proved = rpcmp("verify", config, "--steps", "9")
    assert proved.code == 0, proved.err
    loaded = rpcmp("verify", config, "--steps", "3", "--set", "data.num_workers=2")
    assert loaded.code == 0, loaded.err


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_a_sampled_run_is_gone_on_with_in_the_middle_of_an_epoch(job: JobFolder, at: str) -> None:
    more = f'[checkpoint]\ndir = "saved"\n[data]\nbatch_size = 7\nat = "{at}"'
    config = job.config("steps = 12\n" + MADE["padded"].replace("[data]", more))
    whole = rpcmp("drive", config, "--json", "--set", "checkpoint.dir=other")
    assert rpcmp("drive", config, "--json", "--steps", "8").code == 0
    resumed = rpcmp("drive", config, "--json", "--resume")
    assert resumed.event("resumed")["step"] == 8
    assert committed(resumed)[1] == committed(whole)[1]


@pytest.mark.parametrize("at", ["driver", "stage"])
@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ("samples:Forgetful", "orders the same epoch differently when it is asked again"),
        ("samples:whole_batches", "indices of samples, here from 0 to 49, one by one"),
        ("samples:mapped_loss", "data.sampler = 'samples:mapped_loss' failed"),
        ("samples:missing", "data.sampler"),
    ],
)
def test_a_sampler_that_cannot_be_used_is_refused_before_the_first_step(
    job: JobFolder, at: str, sampler: str, said: str
) -> None:
    config = job.config(NORMALIZED.replace("SAMPLES", "50"))
    options = ("--set", f"data.sampler={sampler}", "--set", f"data.at={at}")
    refused = rpcmp("drive", config, "--json", *options)
    assert refused.code == 2
    assert said in refused.err
    assert not [event for event in refused.events if event["event"] == "step"]


def sampled(sampler: Any, samples: int = 10) -> list[list[int]]:
    """The first three epochs."""
    own, found = data.OwnSampler(sampler, samples, seed=0), []
    for epoch in range(3):
        own.set_epoch(epoch)
        found.append(list(own))
    return found


def test_a_samplers_own_generator_is_seeded_for_each_epoch() -> None:
    generator = torch.Generator().manual_seed(5)
    first = sampled(RandomSampler(range(10), generator=generator))
    torch.rand(3, generator=generator)
    assert sampled(RandomSampler(range(10), generator=generator)) == first
    assert first[0] != first[1] != first[2]
    assert all(sorted(epoch) == list(range(10)) for epoch in first)


@pytest.mark.parametrize("wrong", [[0, 10], [-1, 0], [0, 1.0], ["a", 0], [torch.ones(2), 0]])
def test_a_sampler_yields_indices(wrong: list[Any]) -> None:
    with pytest.raises(ConfigError, match="has to yield indices of samples, here from 0 to 9"):
        sampled(wrong)
    assert sampled([torch.tensor(3), 4])[0] == [3, 4]


def test_a_mini_batch_that_is_no_pair_is_named() -> None:
    section = DataConfig(train="a:b", collate="tests.cluster.test_mini_batches:_triple")  # type: ignore[arg-type]
    batches = data.Batches([(1, 2)] * 4, section, 0, training=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a mini-batch is \(int64\[4\], .*data.collate"):
        next(batches.epoch(1))


def _triple(samples: list[Any]) -> tuple[Any, ...]:
    return (torch.arange(len(samples)),) * 3
