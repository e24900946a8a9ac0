"""The measured times and bytes of layers, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.config.loader import parse_config
from rpcmp.errors import JobError
from rpcmp.pipelining.partition import HostProfile, ProfileOrder
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.rpc import tensors
from rpcmp.tools.bench import models
from rpcmp.worker import profiler
from rpcmp.worker.profiler import measure, stretch
from tests.support import splitlayers
from tests.zoo import zoo

FLOAT = 4
SAMPLES, FEATURES = 5, 64
SLEEPS = ActionTimes(forward=0.25, backward=0.5, weight=1.0)

Chain = list[tuple[str, Callable[[], nn.Module]]]


def chain(kind: str) -> Chain:
    """Return the layers of the configs below."""
    linear = ("linear", lambda: nn.Linear(FEATURES, FEATURES, bias=False))
    head = ("head", lambda: nn.Linear(FEATURES, 1))
    chains: dict[str, Chain] = {
        "linear": [
            linear,
            ("relu", lambda: nn.ReLU(inplace=True)),
            head,
        ],
        "sleep": [linear, ("sleep", lambda: models.Sleep(SLEEPS, 1, FEATURES)), head],
        "sleeper": [linear, ("sleeper", lambda: zoo.Sleeper(500.0)), head],
        "failing": [linear, ("failing", lambda: nn.Linear(3, 3))],
    }
    return chains[kind]


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the functions that a profile process replaces permanently."""
    splitlayers.install(monkeypatch)


def measured(kind: str, differentiates: bool = False, **stage: Any) -> HostProfile:
    config = parse_config(
        {
            "loss": "torch.nn:MSELoss",
            "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}},
            "model": {"layers": f"{__name__}:chain", "kwargs": {"kind": kind}, "num_stages": 1},
            "stages": [stage],
        }
    )
    order = ProfileOrder(config=config, differentiates=differentiates)
    return measure(order, torch.randn(SAMPLES, FEATURES), torch.randn(SAMPLES, 1))


def test_bytes_count_parameters_gradients_momentum_and_new_activations() -> None:
    linear, relu, head = measured("linear").layers
    weight, batch = FEATURES * FEATURES * FLOAT, SAMPLES * FEATURES * FLOAT
    assert linear.state_bytes == 3 * weight
    assert (linear.input_bytes, linear.activation_bytes) == (batch, batch)
    assert linear.snapshot_bytes == 2 * weight  # without gradients
    assert (relu.state_bytes, relu.input_bytes, relu.activation_bytes) == (0, batch, 0)
    assert head.state_bytes == 3 * (FEATURES + 1) * FLOAT
    assert relu.update_s == 0 < linear.update_s


def test_autocast_halves_activations_but_not_parameters() -> None:
    linear, relu, _ = measured("linear", autocast="bfloat16").layers
    weight, batch = FEATURES * FEATURES * FLOAT, SAMPLES * FEATURES * FLOAT
    assert linear.state_bytes == 3 * weight
    assert (linear.input_bytes, linear.activation_bytes) == (batch, batch // 2 + batch // 2)
    assert relu.input_bytes == batch // 2


def test_a_host_profile_has_its_free_memory_and_that_of_an_empty_worker() -> None:
    found = measured("linear")
    assert found.available_bytes is not None
    assert 10 * 2**20 < found.base_bytes < found.available_bytes


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass only while a layer sleeps, without waiting."""
    slept: list[float] = []
    monkeypatch.setattr(models, "sleep", slept.append)
    monkeypatch.setattr(zoo, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: sum(slept)))


@pytest.mark.usefixtures("pretended")
def test_times_go_to_the_forward_the_input_gradient_and_the_weight_gradient() -> None:
    linear, sleep, _ = measured("sleep").layers
    assert (sleep.forward_s, sleep.backward_s, sleep.weight_s) == (0.25, 0.5, 1.0)
    assert (linear.forward_s, linear.backward_s, linear.weight_s) == (0.0, 0.0, 0.0)


def test_every_time_of_a_layer_is_measured() -> None:
    linear, _, _ = measured("linear").layers
    assert min(linear.forward_s, linear.backward_s, linear.weight_s, linear.update_s) > 0


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("differentiates", [True, False])
def test_a_frozen_stage_computes_input_gradients_only_if_layers_before_need_them(
    differentiates: bool,
) -> None:
    linear, sleeper, _ = measured("sleeper", differentiates, frozen=True).layers
    assert linear.state_bytes == FEATURES * FEATURES * FLOAT
    assert sleeper.backward_s == (0.5 if differentiates else 0.0)


def test_a_layer_that_fails_is_named_with_its_input() -> None:
    message = r"(?s)measuring the layer 'failing' failed: RuntimeError.*received float32\[5, 64\]"
    with pytest.raises(JobError, match=message):
        measured("failing")


def test_a_sample_is_equal_after_encoding() -> None:
    x: Tensor = torch.arange(6).reshape(2, 3)
    inputs, targets = tensors.load_message(
        tensors.dump_message(({"x": x, "pair": (x[0], x.double())}, x))
    )
    assert torch.equal(inputs["x"], x)
    assert inputs["pair"][1].dtype is torch.float64
    assert torch.equal(targets, x)


def test_a_host_that_stops_now_and_then_takes_as_long_as_it_does_on_average() -> None:
    short = [(1.0, 1.0, 1.0, 5.0)] * 4
    assert stretch(short) == 2.0 - 1 / 4
    assert stretch([(1.0, 1.0, 1.0)]) == 1.0


def test_one_pause_is_nobodys_pace() -> None:
    assert stretch([(1.0, 1.0, 9.0), (2.0, 2.0, 2.0)]) == 1.0
    assert stretch([(3.0, 3.0, 1.0)]) == 1.0
    assert stretch([(0.0, 0.0)]) == stretch([]) == 1.0
