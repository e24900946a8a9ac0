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
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.rpc.messages import LossWeight, MicrobatchMeta, Mode
from rpcmp.worker.loss import SinkLoss, is_looked_at
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


class Targets:
    """A loss that writes to its targets."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        targets -= 1
        return torch.nn.functional.mse_loss(outputs, targets)


def several(outputs: Tensor, targets: Tensor) -> Any:
    return {"loss": outputs.mean(), "log": 1.0}


net = torch.nn.Linear(1, 1)


def of_a_global(outputs: Tensor, targets: Tensor) -> Any:
    return outputs.mean() + net.weight.norm()


def in_own(name: str) -> SinkLoss:
    return sink(f"{__name__}:{name}")


def test_a_loss_gets_targets_of_its_own_where_it_is_proven() -> None:
    outputs, targets = torch.tensor([1.0, 3.0], requires_grad=True), torch.ones(2)
    in_own("Targets").prove(outputs, targets, meta(), None)
    assert targets.tolist() == [1.0, 1.0]


def test_a_loss_that_returns_more_than_one_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"several' returns .*'log': float.*, and not a tensor"):
        in_own("several").train(torch.ones(2), torch.ones(2), meta(), None)


def test_a_loss_that_reads_parameters_of_a_global_is_refused_unless_they_are_frozen() -> None:
    with pytest.raises(FactoryError, match="of_a_global' has parameters that are none of its own"):
        in_own("of_a_global")
    net.requires_grad_(False)
    in_own("of_a_global")
    net.requires_grad_(True)


def test_micro_batches_that_are_even_in_themselves_are_compared_with_each_other() -> None:
    loss = sink(IGNORING)
    outputs = torch.randn(2, 5, 3, requires_grad=True).transpose(1, 2)
    full, half = torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    half[:, 2:] = -100
    for step in range(1, 3):
        for number in range(2):
            at = MicrobatchMeta(header(step, 2, step=step, num_samples=4), number, 2)
            loss.prove(outputs, full, at, None)
    at = MicrobatchMeta(header(3, 2, step=3, num_samples=4), 0, 2)
    loss.prove(outputs, full, at, None)
    with pytest.raises(ConfigError, match="depends on how a mini-batch is cut into micro-batches"):
        loss.prove(outputs, half, at._replace(number=1), None)


def of_those_that_count(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[targets > 0].mean()


def test_a_metric_that_is_no_mean_over_samples_is_told_once() -> None:
    loss = sink(metrics={"some": f"{__name__}:of_those_that_count"})
    outputs, targets = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1.0, 1.0, 0.0, 1.0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(2):
            at = MicrobatchMeta(header(1, 2, num_samples=8, mode=Mode.EVALUATE), number, 4)
            loss.prove(outputs + number, targets, at, None)
    (text,) = [str(each.message) for each in caught]
    assert text.startswith("metrics.some = ")
    assert "depends on how a mini-batch is cut into micro-batches" in text


@pytest.mark.parametrize(("number", "is_due"), [(1, True), (7, True), (9, False), (64, True)])
def test_rounds_are_looked_at_for_ever_but_less_and_less(number: int, is_due: bool) -> None:
    assert is_looked_at(number) == is_due
