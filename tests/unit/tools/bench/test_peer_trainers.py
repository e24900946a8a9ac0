"""The models and mini-batches of peers."""

from __future__ import annotations

import itertools

import pytest
import torch

from rpcmp.config.job_sections import StageConfig
from rpcmp.errors import ConfigError, UnsupportedJobError
from rpcmp.tools.bench import cases, peer_trainers
from tests.support.chains import PADDED
from tests.support.processes import JobFolder

GRAPH = """
[[stages]]
name = "first"
module = "torch.nn:Identity"
[[stages]]
name = "second"
module = "torch.nn:Bilinear"
kwargs = { in1_features = 4, in2_features = 4, out_features = 1 }
inputs = ["first", "input"]
"""


@pytest.mark.parametrize("name", ["activations", "transformer"])
def test_activations_are_as_large_as_the_case_promises(name: str) -> None:
    config = cases.load(name).config
    first, second = (
        peer_trainers.build(config, i, n).module
        for i, n in enumerate(peer_trainers.layer_names(config))
    )
    inputs, targets = next(peer_trainers.endless_batches(config))
    boundary = first(inputs.chunk(config.num_microbatches)[0])
    sizes = {"activations": 4 * 2**20, "transformer": 4 * 64 * 256 * 4}
    assert boundary.numel() * boundary.element_size() == sizes[name]
    assert second(boundary).shape == targets.chunk(config.num_microbatches)[0].shape


def test_a_case_without_data_is_an_error() -> None:
    config = cases.load("sleep").config.model_copy(update={"data": None})
    with pytest.raises(ConfigError, match=r"\[data\] section, which a benchmark needs: give it"):
        next(peer_trainers.endless_batches(config))


def test_a_part_of_a_cut_stage_keeps_the_order_of_its_layers() -> None:
    config = cases.load("transformer", num_stages=3).config
    whole, cut = (
        peer_trainers.layer_names(config),
        peer_trainers.layer_names(config, parts_per_stage=2),
    )
    assert [len(names) for names in cut] == [1, 2, 1, 2, 1, 1]
    assert list(itertools.chain(*cut)) == list(itertools.chain(*whole))


def test_only_a_chain_of_equal_micro_batches_on_the_cpu_is_supported(job: JobFolder) -> None:
    chain = cases.load("transformer").config
    with pytest.raises(UnsupportedJobError, match="CPU"):
        peer_trainers.layer_names(
            chain.model_copy(update={"stages": [StageConfig(device="cuda:0"), StageConfig()]})
        )
    with pytest.raises(UnsupportedJobError, match="no chain"):
        peer_trainers.layer_names(cases.load(str(job.config(GRAPH))).config)
    with pytest.raises(UnsupportedJobError, match="one layer cannot be cut"):
        peer_trainers.layer_names(cases.load("transformer", num_stages=8).config, parts_per_stage=2)
    with pytest.raises(UnsupportedJobError, match="weighted, by `loss_weight`"):
        peer_trainers.slice_loss(cases.load(str(job.config(PADDED))).config, 3)
    with pytest.raises(UnsupportedJobError, match="do not make 5 equal"):
        peer_trainers.require_equal_microbatches(torch.zeros(32, 1), 5)
