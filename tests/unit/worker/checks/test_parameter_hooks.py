"""Hooks of parameters that micro-batches would call otherwise than a mini-batch are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.worker.checks.parameter_hooks import require_linear, require_own

MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])


def with_hook(hook: Callable[[Tensor], Any]) -> dict[str, nn.Parameter]:
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(hook)
    return dict(layer.named_parameters())


@pytest.mark.parametrize(
    "hook", [lambda g: g * MASK, lambda g: None, lambda g: 3 * g, lambda g: g.flip(0)]
)
def test_linear_hooks_pass(hook: Callable[[Tensor], Any]) -> None:
    require_linear(with_hook(hook).items())


@pytest.mark.parametrize(
    "hook",
    [
        lambda g: g.clamp(-100, 100),
        lambda g: g / g.norm(),
        lambda g: g + 1,
        lambda g: g * (g.norm() < 1e-2),
    ],
)
def test_others_are_refused(hook: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ConfigError, match="the hook of the parameter 'weight' gives some"):
        require_linear(with_hook(hook).items())


def step(parameter: Tensor) -> None:
    parameter.grad = None


def test_a_hook_after_the_gradient_is_refused_unless_it_is_ours() -> None:
    layer = nn.Linear(4, 4)
    ours = functools.partial(step)
    step.__module__ = "rpcmp.worker.buckets"
    layer.bias.register_post_accumulate_grad_hook(ours)
    require_linear(layer.named_parameters())
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ConfigError, match="'weight' has a hook that is called once its gradient"):
        require_linear(layer.named_parameters())


def test_a_hook_that_reads_another_parameter_is_refused_and_nothing_has_changed() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    one.weight.register_hook(lambda g: g * 2)
    pairs = (("one", one), ("other", other))
    named = {f"{key}.{n}": each for key, part in pairs for n, each in part.named_parameters()}
    before = {name: each.detach().clone() for name, each in named.items()}
    require_own(named)
    one.weight.register_hook(lambda g: g * other.weight.mean())
    with pytest.raises(ConfigError, match=r"the hook of the parameter 'one\.weight' reads other"):
        require_own(named)
    assert all(torch.equal(each, before[name]) for name, each in named.items())
