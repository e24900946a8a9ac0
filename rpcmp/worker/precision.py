"""Mixed precision at one stage: what it computes in, and gradients of a scaled loss.

Autocast is entered for one layer's call at a time, and for the loss. torch keeps a low-precision
copy of each weight for as long as an autocast region lasts, so that a weight which is used twice is
cast once and its two gradients are summed in low precision. That cache stays on, as it is in an
ordinary loop; with regions that are no longer than a layer, whose parameters no other layer has,
what is in it never depends on where the model is cut, nothing in it outlives a micro-batch or an
optimizer step, and a recomputed layer finds it as empty as the first forward did.

The loss itself is never multiplied by the scale: the gradient that its backward begins with is the
scale instead of one, which comes to the same and leaves the loss as it is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rpcmp.config.types import Autocast
from rpcmp.errors import ConfigError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class LossScale:
    """What the sink's backwards begin with; the driver's scaler changes it between two steps."""

    value: float = 1.0

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient of the scaled loss by `loss`, a scalar."""
        return torch.full_like(loss, self.value, dtype=torch.float32).to(loss.dtype)


def autocast(device: torch.device, dtype: Autocast | None) -> AbstractContextManager[object]:
    """What a layer's forward runs under; may be entered again and again, but not nested.

    Raises:
        ConfigError: the device cannot compute like that.
    """
    if dtype is None:
        return contextlib.nullcontext()
    try:
        return torch.autocast(device.type, DTYPES[dtype])
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"autocast = {dtype!r} is not to be had on {device}: {reason}") from error


def require_unscalable(stage: str, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that gradients can be divided by the scale without a loss.

    Raises:
        ConfigError: a parameter is float16, and so is its gradient.
    """
    for name, parameter in parameters:
        if parameter.dtype is torch.float16:
            raise ConfigError(
                f"stage {stage!r}: the parameter {name!r} is float16, so its gradient cannot be "
                "unscaled; keep parameters in float32, autocast computes in float16 all the same"
            )


def unscale(parameters: Iterable[nn.Parameter], inverse: float) -> bool:
    """Multiply all gradients by `inverse`, 1 / scale; whether all of them are finite.

    The arithmetic is that of `torch.amp.GradScaler.unscale_`.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    are_finite = [bool(_values(gradient).isfinite().all()) for gradient in gradients]
    for gradient in gradients:
        gradient.mul_(inverse)
    return all(are_finite)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
