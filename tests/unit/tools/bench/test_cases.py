"""The cases of `rpcmp bench`, and the options that they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp.config import loader
from rpcmp.errors import ConfigError
from rpcmp.pipelining import assignment
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.tools.bench import cases
from tests.support.processes import JobFolder

OWN = """
scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 1 } }
max_grad_norm = 1.0
metrics = { mse = "torch.nn:MSELoss" }
[model]
layers = "zoo:mlp"
num_stages = 2
"""


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


def test_an_overridden_model_is_measured_whole_and_halved() -> None:
    model = '{ layers = "rpcmp.tools.bench.models:wide", kwargs = { width = 8 }, num_stages = 2 }'
    case = cases.load("activations", overrides=[f"model={model}"])
    for config in (case.config, case.halves):
        assert config.model is not None
        assert config.model.layers == "rpcmp.tools.bench.models:wide"
        assert config.model.kwargs["width"] == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=3", "model: must be a table"),
        ("data=3", "data: must be a table"),
        ("model.kwargs=3", "model.kwargs: must be a table"),
        ("model.kwargs.times_ms=3", "times_ms = 3: give forward, input_gradient"),
        ('model.kwargs.times_ms.forward="a"', "give forward, input_gradient, weight_gradient"),
        ("model.kwargs.times_ms.forward=-1", "each at least 0"),
    ],
)
def test_an_override_that_does_not_fit_is_an_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cases.load("sleep", overrides=[override])


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
