"""Kernels of the pretend accelerator above autograd: the CPU's fused ones, and autocast's casts.

torch chooses some kernels by the kind of device. An LSTM would run another one than on the CPU,
with other bits; here the CPU's runs, and the CPU differentiates it. On devices that are not torch's
own, autocast casts nothing; here it casts the arguments of the kernels that it casts on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

FUSED = ("lstm.input", "gru.input")

LOWERED = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "conv1d", "conv2d")
"""Kernels that autocast computes in low precision."""

RAISED = ("mse_loss", "nll_loss", "cross_entropy_loss", "binary_cross_entropy_with_logits")
"""Kernels that autocast computes in float32."""


class OnCpu(torch.autograd.Function):
    """A kernel that the CPU computes, and differentiates."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Any,
        wrap: Callable[..., Any],
        launch: Callable[..., Any],
        spec: Any,
        *leaves: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Compute `kernel` of the arguments that `leaves` are, by `spec`."""
        ctx.raws = [
            each.raw.detach().requires_grad_(needed) if hasattr(each, "raw") else each
            for each, needed in zip(leaves, ctx.needs_input_grad[4:], strict=True)
        ]
        index = next(each.device.index for each in leaves if isinstance(each, torch.Tensor))
        launch(index, kernel, leaves, {})
        ctx.launch = lambda gradients: launch(index, kernel, gradients, {})
        ctx.wrap = lambda raw: wrap(raw, index)
        args, kwargs = pytree.tree_unflatten(ctx.raws, spec)
        with torch.enable_grad():
            ctx.outputs = kernel(*args, **kwargs)
        return tuple(ctx.wrap(each.detach()) for each in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Differentiate it by the inputs that need it."""
        ctx.launch(gradients)
        needed = [i for i, needs in enumerate(ctx.needs_input_grad[4:]) if needs]
        found = torch.autograd.grad(
            ctx.outputs,
            [ctx.raws[i] for i in needed],
            [gradient.raw for gradient in gradients],
            allow_unused=True,
        )
        ctx.outputs, result = None, [None] * len(ctx.raws)
        for i, gradient in zip(needed, found, strict=True):
            result[i] = None if gradient is None else ctx.wrap(gradient)
        return (None, None, None, None, *result)


def add_fused(
    library: torch.library.Library, wrap: Callable[..., Any], launch: Callable[..., Any]
) -> None:
    """Let the CPU compute and differentiate what it has a kernel of its own for.

    Args:
        wrap: makes a tensor of the device of the CPU's.
        launch: adds a kernel to a device's stream.
    """

    def adding(kernel: Any) -> None:
        def compute(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            return OnCpu.apply(kernel, wrap, launch, spec, *leaves)

        library.impl(kernel, compute, "AutogradPrivateUse1")

    for name in FUSED:
        packet, overload = name.split(".")
        adding(getattr(getattr(torch.ops.aten, packet), overload))


def add_autocast(library: torch.library.Library, name: str) -> None:
    """Cast what autocast casts on the CPU."""
    key: Any = torch._C._dispatch_key_parse("AutocastPrivateUse1")
    keys = torch._C.DispatchKeySet(key)

    def adding(kernel: Any, dtype: Callable[[], torch.dtype]) -> None:
        def compute(*args: Any, **kwargs: Any) -> Any:
            def cast(value: Any) -> Any:
                is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
                return value.to(dtype()) if is_float else value

            with torch._C._ExcludeDispatchKeyGuard(keys):
                args, kwargs = pytree.tree_map(cast, (args, kwargs))
                return kernel(*args, **kwargs)

        library.impl(kernel, compute, "AutocastPrivateUse1")

    for kernel in LOWERED:
        adding(getattr(torch.ops.aten, kernel).default, lambda: torch.get_autocast_dtype(name))
    for kernel in RAISED:
        adding(getattr(torch.ops.aten, kernel).default, lambda: torch.float32)
