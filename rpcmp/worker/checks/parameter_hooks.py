"""Refuse hooks of parameters that micro-batches would call otherwise than a mini-batch.

    a mini-batch      hook(g1 + g2)             once
    micro-batches     hook(g1) + hook(g2)       equal, if it is linear: a mask, a factor; not if it
                                                clips, or divides by the norm

Hooks are tried on gradients of several sizes, whatever the first batches have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError

SIZES = (1e-3, 1.0, 1e3)
"""Of the gradients that are tried."""

STRETCH = 1024.0
"""How much larger a gradient is tried."""

ROUNDING = 1e-3
"""How far results may be apart, in parts of the largest."""


def require_linear(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check the hooks of parameters, for a step of several micro-batches.

    Raises:
        ConfigError: one is not linear, or does something after each micro-batch's backward.
    """
    for name, parameter in named:
        after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if not all(map(_is_ours, after.values())):
            raise ConfigError(
                f"the parameter {name!r} has a hook that is called once its gradient is there "
                "(register_post_accumulate_grad_hook), so after each micro-batch and not once per "
                "mini-batch: set num_microbatches = 1, or do it in the optimizer's step"
            )
        hook = _hook_of(parameter)
        if hook is not None and not all(_is_linear(hook, parameter, size) for size in SIZES):
            raise ConfigError(
                f"the hook of the parameter {name!r} gives something else for the gradients of "
                "micro-batches than for their sum, since it is not linear: clip with "
                "`max_grad_norm`, change gradients in the optimizer's step, or set "
                "num_microbatches = 1"
            )


def require_own(named: Mapping[str, nn.Parameter]) -> None:
    """Check that no hook of a parameter reads another one, which may lie on another host.

    Raises:
        ConfigError: one does.
    """
    for name, parameter in named.items():
        if (hook := _hook_of(parameter)) is None:
            continue
        (gradient,) = _gradients(parameter, 1.0, 1)
        before = hook(gradient)
        others = [each for each in named.values() if each is not parameter]
        kept = [each.detach().clone() for each in others]
        try:
            for each in others:
                each.data.add_(1)
            after = hook(gradient)
        finally:
            for each, value in zip(others, kept, strict=True):
                each.data.copy_(value)
        if not torch.equal(before, after):
            raise ConfigError(
                f"the hook of the parameter {name!r} reads other parameters, of which its stage "
                "may have none, or not the present values: change gradients in the optimizer's "
                "step, or write the model as layers by hand"
            )


def _is_ours(hook: Any) -> bool:
    """Whether it is one by which stages sum gradients."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("rpcmp.")


def _hook_of(parameter: nn.Parameter) -> Callable[[Tensor], Tensor] | None:
    hooks: Any = getattr(parameter, "_backward_hooks", None)
    if not hooks:
        return None

    def call(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        for hook in list(hooks.values()):
            found = hook(gradient)
            gradient = gradient if found is None else found
        return gradient.detach().clone()

    return call


def _is_linear(hook: Callable[[Tensor], Tensor], parameter: nn.Parameter, size: float) -> bool:
    one, other = _gradients(parameter, size, 2)
    if not one.numel():
        return True
    pairs = [
        (hook(one + other), hook(one) + hook(other)),
        (hook(one * STRETCH) / STRETCH, hook(one)),  # it may do something from some size on
    ]
    for together, apart in pairs:
        largest = max(float(each.abs().max()) for each in (together, apart))
        if largest and float((together - apart).abs().max()) > ROUNDING * largest:
            return False
    return True


def _gradients(parameter: nn.Parameter, size: float, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        (size * torch.randn(parameter.shape, generator=generator)).to(
            parameter.device, parameter.dtype
        )
        for _ in range(count)
    ]
