"""The sink's loss: shares of micro-batches, those that weigh nothing, and a mean of means."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcmp.config.loader import parse_config
from rpcmp.rpc.messages import LossWeight, MicrobatchMeta
from rpcmp.worker.loss import SinkLoss
from tests.support.rounds import header

IGNORING = "torch.nn:CrossEntropyLoss"


def sink(loss: Any = "torch.nn:MSELoss", **more: Any) -> SinkLoss:
    config = parse_config({"model": {"layers": "m:layers"}, "loss": loss, **more})
    return SinkLoss(config, torch.device("cpu"), contextlib.nullcontext(), [])


def meta(step: int = 1, count: int = 2) -> MicrobatchMeta:
    return MicrobatchMeta(header(1, count, step=step, num_samples=8), 0, 2)


def test_a_part_of_the_loss_is_its_share_of_the_samples_or_of_the_weight() -> None:
    outputs, targets = torch.tensor([1.0, 3.0]), torch.zeros(2)
    assert sink().train(outputs, targets, meta(), None) == 5.0 / 4
    assert sink().train(outputs, targets, meta(), LossWeight(1.0, 8.0)) == 5.0 / 8
    evaluated = sink().evaluate(outputs, targets, meta(), LossWeight(1.0, 8.0))
    assert (evaluated.loss, evaluated.weight) == (5.0, 1.0)
    assert sink().evaluate(outputs, targets, meta(), None).weight is None


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_what_weighs_nothing_has_no_loss_and_no_gradient_whatever_comes_out(value: float) -> None:
    leaf = torch.full((2, 3), value, requires_grad=True)
    scalar = torch.tensor(value, requires_grad=True)
    outputs = {"logits": leaf * 1, "aside": [scalar * 1, torch.tensor(2)]}
    loss = sink(f"{__name__}:raising").train(outputs, None, meta(), LossWeight(0.0, 8.0))
    assert loss == 0
    loss.backward()
    assert torch.equal(leaf.grad, torch.zeros(2, 3))  # type: ignore[arg-type]
    assert scalar.grad == 0
    evaluated = sink(f"{__name__}:raising").evaluate(leaf, None, meta(), LossWeight(0.0, 0.0))
    assert (evaluated.loss, evaluated.weight) == (0.0, 0.0)


def raising(outputs: Tensor, targets: Tensor) -> Tensor:
    raise AssertionError("nothing counts")


def warned(found: SinkLoss, at: MicrobatchMeta, *labels: int) -> list[str]:
    outputs, targets = torch.zeros(len(labels), 3), torch.tensor(labels)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            found.train(outputs, targets, at, None)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    "loss",
    [
        IGNORING,
        "torch.nn:NLLLoss",
        "torch.nn.functional:cross_entropy",
        {"callable": "torch.nn.functional:nll_loss", "kwargs": {"ignore_index": 1}},
    ],
)
def test_a_mean_of_means_is_warned_of_once(loss: Any) -> None:
    index = 1 if isinstance(loss, dict) else -100
    (text,) = warned(sink(loss), meta(), 0, index)
    assert f"since it leaves out targets that are {index}, but micro-batches are weighted" in text
    assert 'set `loss_weight` for the loss of the whole mini-batch ("rpcmp.losses:tokens"' in text


def test_weights_of_classes_are_a_mean_of_means_too() -> None:
    found = sink(f"{__name__}:Weighted")
    (text,) = warned(found, meta(), 0, 1)
    assert "since it weighs classes" in text


class Weighted(torch.nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__(weight=torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    ("loss", "at", "labels", "more"),
    [
        (IGNORING, meta(), (0, 1), {}),
        (IGNORING, meta(step=2), (0, -100), {}),
        (IGNORING, meta(count=1), (0, -100), {}),
        (IGNORING, meta(), (0, -100), {"loss_weight": "rpcmp.losses:tokens"}),
        ({"callable": IGNORING, "kwargs": {"reduction": "sum"}}, meta(), (0, -100), {}),
        ("rpcmp.losses:masked_lm", meta(), (0, -100), {}),
    ],
)
def test_a_mean_of_the_whole_is_not_warned_of(
    loss: Any, at: MicrobatchMeta, labels: tuple[int, ...], more: dict[str, Any]
) -> None:
    assert warned(sink(loss, **more), at, *labels) == []
