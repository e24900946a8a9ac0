"""What micro-batches weigh, by a function of their targets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcmp.config.loader import parse_config
from rpcmp.data import loss_weights
from rpcmp.data.loss_weights import LossWeights
from rpcmp.errors import ConfigError, FactoryError

PARTS = [torch.full((2, 3), -100), torch.tensor([[1, 2, -100]]), torch.full((2, 3), 4)]


def weights(source: Any, **more: Any) -> LossWeights:
    config = {"model": {"layers": "m:layers"}, "loss": "m:loss", "loss_weight": source, **more}
    return LossWeights(parse_config(config))


def half(targets: Tensor, by: float = 2.0) -> float:
    return len(targets) / by


def odd(targets: Tensor) -> Any:
    return {1: math.nan, 2: torch.ones(2)}[len(targets)]


def test_each_micro_batch_weighs_what_the_function_counts() -> None:
    found = weights("rpcmp.losses:tokens").of(PARTS, "step 1", trained=True)
    assert found == [0.0, 2.0, 6.0]
    shares = [weight.share for weight in loss_weights.shares(found)]
    assert shares == [0.0, 0.25, 0.75]


def test_a_function_may_be_the_users_own_and_have_arguments() -> None:
    source = {"callable": f"{__name__}:half", "kwargs": {"by": 4.0}}
    assert weights(source).of(PARTS, "step 1", trained=True) == [0.5, 0.25, 0.5]


def test_without_a_function_samples_count() -> None:
    assert weights(None).of(PARTS, "step 1", trained=True) == []
    assert loss_weights.shares([]) == []


def test_a_mini_batch_without_any_weight_may_be_evaluated_but_not_trained_on() -> None:
    counting = weights("rpcmp.losses:tokens")
    assert counting.of(PARTS[:1], "evaluation", trained=False) == [0.0]
    text = "^step 7: the mini-batch weighs nothing, .* gives 0 for each of its 1 micro-batches"
    with pytest.raises(ConfigError, match=text):
        counting.of(PARTS[:1], "step 7", trained=True)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (0, "failed for targets int64[2, 3]: "),
        (1, "gives nan: it has to give one number that is not negative"),
    ],
)
def test_what_is_no_weight_is_named(part: int, text: str) -> None:
    name = f"{__name__}:odd"
    with pytest.raises(FactoryError) as raised:
        weights(name).of([PARTS[part]], "step 7", trained=True)
    assert str(raised.value).startswith(f"step 7, micro-batch 0: loss_weight = {name!r} {text}")


def test_a_loss_that_adds_up_is_refused_with_the_config() -> None:
    loss = {"callable": "torch.nn:CrossEntropyLoss", "kwargs": {"reduction": "sum"}}
    with pytest.raises(ConfigError, match="leave out one of `loss_weight`"):
        weights("rpcmp.losses:tokens", loss=loss)
