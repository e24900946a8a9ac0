"""The models of the frozen cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpcmp.config.schema import Config
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.tools.bench import cases, models, peer_trainers
from tests.support.nearness import assert_near


def _layers(config: Config, parts_per_stage: int) -> list[Any]:
    """Return the built layers of all parts."""
    names = peer_trainers.layer_names(config, parts_per_stage)
    built = (
        peer_trainers.build(config, i // parts_per_stage, layers) for i, layers in enumerate(names)
    )
    return [layer for each in built for layer in each.module]


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
