"""The cases of `rpcmp bench`, and the options that they refuse."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.config.sections import StageConfig
from rpcmp.errors import ConfigError, UnsupportedJobError
from rpcmp.pipelining import assignment
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.tools.bench import cases, contestants, models, peer_trainers
from tests.support.nearness import assert_near
from tests.support.processes import JobFolder

OWN = """
scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 1 } }
max_grad_norm = 1.0
metrics = { mse = "torch.nn:MSELoss" }
[model]
layers = "zoo:mlp"
num_stages = 2
"""

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


def _layers(config: Config, parts_per_stage: int) -> list[Any]:
    """The built layers of all parts."""
    names = peer_trainers.layer_names(config, parts_per_stage)
    built = (
        peer_trainers.build(config, i // parts_per_stage, layers) for i, layers in enumerate(names)
    )
    return [layer for each in built for layer in each.module]


def test_the_frozen_cases_do_not_change() -> None:
    found = {
        name: (case.config.num_stages, case.config.num_microbatches, case.nominal)
        for name in cases.frozen()
        for case in [cases.load(name)]
    }
    assert found == {
        "sleep": (4, 16, ActionTimes(0.010, 0.010, 0.010)),
        "overhead": (2, 32, ActionTimes(0.0005, 0.0005, 0.0005)),
        "transformer": (2, 8, None),
        "activations": (2, 8, None),
    }


def test_two_half_stages_equal_one_in_sleep_and_weights() -> None:
    case = cases.load("sleep", num_stages=2)
    whole = _layers(case.config, 1)
    halves = _layers(case.halves, 2)
    assert [len(layers) for layers in (whole, halves)] == [2, 4]
    for layers in (whole, halves):
        assert sum(layer.times.forward for layer in layers) == pytest.approx(0.020)
        assert sum(layer.times.backward for layer in layers) == pytest.approx(0.020)
        assert sum(layer.times.weight for layer in layers) == pytest.approx(0.020)
        assert sum(layer.weight.numel() for layer in layers) == 2 * 2 * 8


def test_a_sleeping_layer_is_a_sum_whose_three_actions_sleep_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(models, "sleep", slept.append)
    x, weight = torch.randn(3, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    y = models.apply_sleep(x, weight, ActionTimes(1.0, 2.0, 3.0))
    assert_near(y, x + weight.sum(0))
    assert slept == [1.0]
    (to_input,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert torch.equal(to_input, torch.ones(3, 2))
    assert slept == [1.0, 2.0]
    (to_weight,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert torch.equal(to_weight, torch.full((2, 2), 3.0))
    assert slept == [1.0, 2.0, 3.0]


def test_the_first_sleeping_layer_has_an_input_gradient_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(models, "sleep", slept.append)
    layer = models.Sleep(ActionTimes(1.0, 2.0, 3.0), num_rows=1, features=2)
    layer(torch.randn(3, 2)).sum().backward()
    assert sorted(slept) == [1.0, 2.0, 3.0]


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


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "batch_size"),
    [("sleep", 32, 64, 64), ("activations", 4, 3, 3), ("transformer", 8, 16, 32)],
)
def test_a_case_grows_with_stages_and_micro_batches(
    name: str, stages: int, microbatches: int, batch_size: int
) -> None:
    case = cases.load(name, stages, microbatches)
    assert case.config.data is not None
    assert (case.config.num_stages, case.config.num_microbatches) == (stages, microbatches)
    assert case.config.data.batch_size == batch_size
    assert len(assignment.assign(case.config)) == stages


def test_the_bound_follows_overridden_times() -> None:
    times = "{ forward = 1.0, input_gradient = 2.0, weight_gradient = 3.0 }"
    case = cases.load("sleep", overrides=[f"model.kwargs.times_ms={times}"])
    assert case.nominal == ActionTimes(0.001, 0.002, 0.003)


def test_a_part_of_a_cut_stage_keeps_the_order_of_its_layers() -> None:
    config = cases.load("transformer", num_stages=3).config
    whole, cut = (
        peer_trainers.layer_names(config),
        peer_trainers.layer_names(config, parts_per_stage=2),
    )
    assert [len(names) for names in cut] == [1, 2, 1, 2, 1, 1]
    assert list(itertools.chain(*cut)) == list(itertools.chain(*whole))


def test_a_users_config_is_measured_without_features_that_peers_lack(job: JobFolder) -> None:
    path = job.config(OWN)
    case = cases.load(str(path), num_microbatches=5, overrides=["data.batch_size=20"])
    config = case.config
    assert (config.num_microbatches, config.folder) == (5, path.parent.resolve())
    assert (config.scheduler, config.max_grad_norm, config.metrics) == (None, None, {})
    assert config.data is not None
    assert (config.data.batch_size, config.data.drop_last) == (20, True)
    assert case.notes == ("without learning-rate scheduler and gradient clipping",)
    assert cases.load(str(path), num_stages=4).config.num_stages == 4
    mixed = cases.load(str(path), overrides=["autocast=float16", "loss_scaling={}"])
    assert (mixed.config.autocast, mixed.config.loss_scaling) == (None, None)
    assert mixed.notes[1:] == ("without autocast and loss scaling",)
    assert loader.load_config(path).max_grad_norm == 1.0


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
    with pytest.raises(UnsupportedJobError, match="do not make 5 equal"):
        peer_trainers.require_equal_microbatches(torch.zeros(32, 1), 5)


def test_a_config_without_data_cannot_be_measured(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('loss = "torch.nn:MSELoss"\nmodel = { layers = "m:layers" }\n')
    with pytest.raises(ConfigError, match=r"no \[data\] section"):
        cases.load(str(path))


@pytest.mark.parametrize(
    "override", ["stages=[{replicas = 2}, {}]", 'tied=[["head.weight", "block0.weight"]]']
)
def test_a_config_that_no_peer_supports_is_refused(job: JobFolder, override: str) -> None:
    with pytest.raises(ConfigError, match="replicas or tied parameters"):
        cases.load(str(job.config(OWN)), overrides=[override])


def test_every_peer_of_a_case_exists() -> None:
    chosen = [name for case in cases.frozen().values() for name in case.peers or ()]
    assert set(chosen) <= set(contestants.CONTESTANTS)
