"""Prove in the first step that the sum of the micro-batches' losses is the mini-batch's loss.

    a micro-batch      its loss, a mean over 8 samples              2.31
    its halves         the mean of their losses, by their samples   2.31: cut as one likes, the same
                                                                    1.72: each cut has another one

What is trained is a weighted mean of the micro-batches' losses. For a loss with in-batch negatives,
with statistics of the batch, or with a mean over what is not padding, that is another objective
than the loss of the mini-batch, and depends on `num_microbatches`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.pipelining import pytree
from rpcmp.worker.forward_state import ForwardState, put_back

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
"""How far two results may be apart, in parts of the largest of them; LOW_ROUNDING of others."""

LOW_ROUNDING = 0.02

LEAST = 1e-30
"""A loss that counts as zero."""

WAYS_OUT = (
    "return a mean over samples, weigh micro-batches by what it is a mean over (`loss_weight`), "
    'set num_microbatches = 1, or loss_scope = "micro-batch" if that is meant'
)

WAYS_OUT_OF_METRICS = (
    'give it update, compute and reset, as torchmetrics have, or set loss_scope = "micro-batch" '
    "if a mean over micro-batches is meant"
)


class Objective:
    """Compares a loss, or a metric, of samples with those of their parts.

    Args:
        name: in the config, "loss = 'torch.nn:MSELoss'".
        call: returns a scalar for outputs and targets.
        weigh: returns what a mean counts, of targets; None: samples.
        is_sum: whether it adds up over samples.
        state: what a call may change; it is put back.
        is_trained: whether this is what is trained, which may change nothing.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[Any, Any], Any],
        weigh: Callable[[Any], Any] | None,
        is_sum: bool,
        state: ForwardState,
        is_trained: bool = False,
    ) -> None:
        self._name, self._call = name, call
        self._weigh, self._is_sum, self._state = weigh, is_sum, state
        self._is_trained = is_trained
        self._ways_out = WAYS_OUT_OF_METRICS if name.startswith("metrics.") else WAYS_OUT
        self._last: tuple[Any, Any, int] | None = None

    def require_additive(self, outputs: Any, targets: Any, samples: int) -> None:
        """Check one micro-batch, or together with the one before if each is a single sample.

        Raises:
            ConfigError: its parts have another loss than the whole.
        """
        outputs = pytree.map_tensors(Tensor.detach, outputs)
        if samples == 1:
            last, self._last = self._last, (outputs, targets, samples)
            if last is None:
                return
            parts = [(*last[:2], 1), (outputs, targets, 1)]
            outputs, targets = (_joined(last[n], (outputs, targets)[n]) for n in (0, 1))
            samples = 2
        else:
            half = samples // 2
            parts = [
                (_rows(outputs, 0, half, samples), _rows(targets, 0, half, samples), half),
                (
                    _rows(outputs, half, samples, samples),
                    _rows(targets, half, samples, samples),
                    samples - half,
                ),
            ]
        before = self._state.copy()
        try:
            with torch.no_grad():
                self._call(outputs, targets)
            if self._is_trained and (changed := [e.place.name for e in before if e.has_changed]):
                raise ConfigError(
                    f"{self._name} changes {', '.join(changed)} in each call, so once per "
                    "micro-batch and not once per mini-batch: set num_microbatches = 1, or "
                    'loss_scope = "micro-batch" if that is meant'
                )
            put_back(before)
            self._compare(outputs, targets, parts)
        finally:
            put_back(before)

    def _compare(self, outputs: Any, targets: Any, parts: list[tuple[Any, Any, int]]) -> None:
        with torch.no_grad():
            whole, again = self._value(outputs, targets), self._value(outputs, targets)
            if whole.item() != again.item() and not math.isnan(whole.item()):
                warnings.warn(
                    f"{self._name} differs from call to call, so the loss of a mini-batch cannot "
                    "be compared with those of its micro-batches",
                    stacklevel=1,
                )
                return
            weights = [
                float(size if self._weigh is None else self._weigh(t)) for _, t, size in parts
            ]
            values = [
                self._value(*part[:2]).item() if weight else 0.0
                for part, weight in zip(parts, weights, strict=True)
            ]
        total = 1.0 if self._is_sum else math.fsum(weights)
        if not total:
            return
        shares = [1.0] * len(parts) if self._is_sum else [weight / total for weight in weights]
        mean = sum(value * share for value, share in zip(values, shares, strict=True))
        largest = max(abs(whole.item()), *map(abs, values), LEAST)
        apart = abs(whole.item() - mean)  # NaN, if one of them is: then the step fails by itself
        if apart > ROUNDING.get(whole.dtype, LOW_ROUNDING) * largest:
            raise ConfigError(
                f"{self._name} depends on how a mini-batch is cut into micro-batches: it is "
                f"{whole.item():.6g} of some samples together, and {mean:.6g} as a mean of their "
                f"halves; {self._ways_out}"
            )

    def _value(self, outputs: Any, targets: Any) -> Tensor:
        value = self._call(outputs, targets)
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.reshape(())
        return torch.tensor(float(value))


def _rows(tree: Any, start: int, end: int, samples: int) -> Any:
    """Return the rows of some samples; a sample may have several, such as one per token."""

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] % samples:
            return tensor
        each = tensor.shape[0] // samples
        return tensor[start * each : end * each].contiguous()

    return pytree.map_tensors(cut, tree)


def _joined(one: Any, other: Any) -> Any:
    following = iter(pytree.leaves(other))

    def join(leaf: Any) -> Any:
        beside = next(following)
        return torch.cat([leaf, beside]) if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return pytree.map_leaves(join, one)
