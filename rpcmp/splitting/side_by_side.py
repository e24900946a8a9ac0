"""A module and the layers that it is cut into, side by side: both are called with the same.

They share parameters and buffers, and draw from torch's generators in the same order, so dropout is
compared as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError, one_line
from rpcmp.splitting import comparison
from rpcmp.splitting.exporting import Structure, flatten
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.split import Split
from rpcmp.splitting.weights import tensors_of


class SideBySide:
    """Calls a module and its layers in turn.

    Args:
        module: with values of its parameters; its buffers and attributes change.
        autocast: the dtype that both are run in.
        name: of the module, in messages.

    Attributes:
        needs_two_samples: whether a layer computes something else, or nothing, for one.
    """

    def __init__(
        self, module: nn.Module, split: Split, autocast: torch.dtype | None, name: str
    ) -> None:
        self.module, self._autocast, self.name = module, autocast, name
        text = split.model_dump_json(include={"layers"})
        self._is_low = autocast is not None or "float16" in text or '"autocast"' in text
        self._tensors = tensors_of(module)
        count = len(split.layers)
        self._layers = [SplitLayer(split, index, self._tensors) for index in range(count)]
        held = {name: each for layer in self._layers for name, each in tensors_of(layer).items()}
        self._copies = {
            id(self._tensors[first]): [held[name] for name in names] for first, *names in split.tied
        }
        self.needs_two_samples = any(layer.needs_two_samples for layer in self._layers)

    def set_mode(self, training: bool) -> None:
        """Put both into training or evaluation mode."""
        for part in (self.module, *self._layers):
            part.train(training)

    def values(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self._tensors.items()}

    def new_values(self) -> dict[str, Tensor]:
        return {f"the new value of {name!r}": each for name, each in self.values().items()}

    def give(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self._tensors[name].data.copy_(value)

    def called(
        self, call: Callable[[Any], Any], batch: Any, differentiates: bool, turn: int
    ) -> tuple[Structure, list[Any]]:
        torch.manual_seed(turn)
        try:
            with torch.set_grad_enabled(differentiates), autocast_to(self._autocast):
                return flatten(call(_copied(batch)))
        except ConfigError:
            raise
        except Exception as error:
            raise self.error(f"fails on the first samples: {one_line(error)}") from error

    def call_module(self, batch: Any) -> Any:
        return called_with(self.module, batch)

    def call_layers(self, batch: Any) -> Any:
        for layer in self._layers:
            batch = layer(batch)
        return self._layers[-1].as_returned(batch)

    def gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield each parameter's gradient, the last parameter's first, and forget them."""
        seen: set[int] = set()
        for name, tensor in reversed(self._tensors.items()):
            if id(tensor) in seen or not tensor.requires_grad:
                continue
            seen.add(id(tensor))
            copies = [tensor, *self._copies.get(id(tensor), ())]
            known = [each.grad for each in copies if each.grad is not None]
            for each in copies:
                each.grad = None
            yield f"the gradient of {name!r}", sum(known[1:], known[0]) if known else None

    def draws(self, batch: Any) -> bool:
        """Whether a call, in the present mode, draws random numbers."""
        torch.manual_seed(0)
        before = torch.get_rng_state()
        self.called(self.call_module, batch, False, 0)
        return not torch.equal(before, torch.get_rng_state())

    def first_difference(
        self, found: dict[str, Any], expected: dict[str, Any], loosely: bool = False
    ) -> str:
        """See `comparison.first_difference`; `loosely`: of sums over other numbers of samples."""
        rounding = self.loosely if loosely else self._rounding
        return comparison.first_difference(found, expected, rounding)

    def loosely(self, dtype: torch.dtype) -> float:
        """How far results may be apart that were summed over other numbers of samples."""
        return min(100 * self._rounding(dtype), 0.2)

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.name} {reason}")

    def _rounding(self, dtype: torch.dtype) -> float:
        low = comparison.LOW_ROUNDING
        return low if self._is_low else comparison.ROUNDING.get(dtype, low)


def called_with(module: nn.Module, batch: Any) -> Any:
    """Return what a module gives for a mini-batch: a tensor, arguments, or a dict of them."""
    if isinstance(batch, dict):
        return module(**batch)
    return module(*(batch if isinstance(batch, tuple | list) else [batch]))


def autocast_to(dtype: torch.dtype | None) -> torch.autocast:
    """Return what a job's layers are run in."""
    return torch.autocast("cpu", dtype, enabled=dtype is not None)


def drawn(outputs: Sequence[Any], scale: float) -> list[Tensor | None]:
    """Return a gradient for each output that needs one, the same for the same outputs."""
    generator = torch.Generator().manual_seed(1)
    return [
        scale * torch.randn(each.shape, dtype=each.dtype, generator=generator)
        if isinstance(each, Tensor) and each.requires_grad
        else None
        for each in outputs
    ]


def backward(outputs: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
    needed = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if needed:
        torch.autograd.backward([outputs[n] for n in needed], [gradients[n] for n in needed])


def _copied(batch: Any) -> Any:
    """Return a mini-batch of its own for one call, which may change it."""
    if isinstance(batch, dict):
        return {name: each.clone() for name, each in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(each.clone() for each in batch)
    return batch.clone()
