"""A module and its layers are called with the same, and told apart by what they give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rpcmp.errors import ConfigError
from rpcmp.splitting.side_by_side import SideBySide, backward, drawn
from rpcmp.splitting.split import split_module


def pair(dropout: float = 0.5) -> SideBySide:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout), nn.Linear(4, 4))
    return SideBySide(module, split_module(module, torch.ones(3, 4)), None, "Both")


def test_both_draw_the_same_and_give_gradients_to_the_same_parameters() -> None:
    both, results = pair(), list[dict[str, Any]]()
    both.set_mode(training=True)
    for call in (both.call_module, both.call_layers):
        structure, outputs = both.called(call, torch.ones(3, 4), True, 0)
        backward(outputs, drawn(outputs, 1.0))
        results.append({"out": outputs[0].detach(), **dict(both.gradients())})
    assert structure == 0
    assert [*results[0]][1:] == [
        f"the gradient of {n!r}" for n in ("2.bias", "2.weight", "0.bias", "0.weight")
    ]
    assert not both.first_difference(results[0], results[1])
    assert all(each is None for each in dict(both.gradients()).values())


def test_values_are_given_back() -> None:
    both = pair()
    before = both.values()
    both.module[0].weight.data.zero_()  # type: ignore[index]
    both.give(before)
    assert all(torch.equal(each, before[name]) for name, each in both.values().items())


def test_only_what_draws_random_numbers_draws_them() -> None:
    both = pair()
    both.set_mode(training=True)
    assert both.draws(torch.ones(3, 4))
    both.set_mode(training=False)
    assert not both.draws(torch.ones(3, 4))


def test_a_failure_is_that_of_the_module_by_name() -> None:
    both = pair()
    with pytest.raises(ConfigError, match=r"^Both fails on the first samples: "):
        both.called(both.call_module, torch.ones(3, 5), False, 0)
