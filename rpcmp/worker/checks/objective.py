"""Prove in the first step that the sum of the micro-batches' losses is the mini-batch's loss.

    a micro-batch      its loss, a mean over 8 samples              2.31
    its parts          the mean of their losses, by their samples   2.31: cut as one likes, the same
                                                                    1.72: each cut has another one

What is trained is a weighted mean of the micro-batches' losses. For a loss with in-batch negatives,
with statistics of the batch, or with a mean over what is not padding, that is another objective
than the loss of the mini-batch, and depends on `num_microbatches`.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpcmp.errors import ConfigError, one_line
from rpcmp.pipelining import pytree, random_streams
from rpcmp.worker.state.forward_state import ForwardState
from rpcmp.worker.weight_grad import saves_otherwise

ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
"""How far two results may be apart, in parts of the largest of them; LOW_ROUNDING of others."""

LOW_ROUNDING = 0.02

MOST_KEPT = 2**20
"""Elements of outputs that are kept for the next micro-batch; of more, those of one sample."""

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
        is_trained: whether this is what is trained: its gradient counts, and it may change nothing.
        is_low: whether it is computed in less precision than its outputs have.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[Any, Any], Any],
        weigh: Callable[[Any], Any] | None,
        is_sum: bool,
        state: ForwardState,
        is_trained: bool = False,
        is_low: bool = False,
    ) -> None:
        self._name, self._call = name, call
        self._weigh, self._is_sum, self._state = weigh, is_sum, state
        self._is_trained, self._is_low = is_trained, is_low
        self._ways_out = WAYS_OUT_OF_METRICS if name.startswith("metrics.") else WAYS_OUT
        self._last: Part | None = None
        self._is_given_up = False

    def forget(self) -> None:
        """Drop the sample that waits for another one."""
        self._last = None

    def require_additive(self, outputs: Any, targets: Any, samples: int) -> None:
        """Check one micro-batch, and the one before together with it.

        Raises:
            ConfigError: its parts have another loss than the whole.
        """
        if self._is_given_up:
            return
        if self._is_trained:
            outputs = pytree.map_tensors(_leaf, outputs)
        before = self._state.copy()
        try:
            with random_streams.kept(), torch.set_grad_enabled(self._is_trained), own_tape():
                self._try(Part(outputs, targets, samples))
        except ConfigError:
            raise
        except Exception as error:  # it needs whole mini-batches, or outputs that are no leaves
            self._give_up(f"cannot be called with parts of a micro-batch ({one_line(error)})")
        finally:
            self._state.put_back(before)

    def _try(self, whole: Part) -> None:
        if whole.samples > 1:
            first = max(1, whole.samples // 3)  # unequal parts: equal ones may be equal by chance
            self._try_parts(whole, [whole.rows(0, first), whole.rows(first, whole.samples)])
        # Also with the one before: each of them may be even in itself, such as in its padding.
        size = sum(each.numel() for each in pytree.tensors(whole.outputs))
        last, self._last = self._last, (whole if size <= MOST_KEPT else whole.rows(0, 1)).copy()
        if last is not None and not self._is_given_up:
            outputs, targets = map(joined, last[:2], self._last[:2])
            self._try_parts(
                Part(outputs, targets, last.samples + self._last.samples), [last, self._last]
            )

    def _try_parts(self, whole: Part, parts: list[Part]) -> None:
        begun = self._state.copy()
        value = self._value(whole)
        if self._is_trained:
            self._require_constant(whole)
        self._state.put_back(begun)
        if self._value(whole).item() != value.item() and not math.isnan(value.item()):
            self._give_up("differs from call to call")
            return
        self._state.put_back(begun)
        self._compare(value, whole, parts)

    def _require_constant(self, whole: Part) -> None:
        """Refuse what changes with a second call; a note of the last one is the same again."""
        once = self._state.copy()
        self._value(whole)
        if changed := [each.place.name for each in once if each.has_new_value]:
            raise ConfigError(
                f"{self._name} changes {', '.join(changed)} in each call, so once per micro-batch "
                "and not once per mini-batch: set num_microbatches = 1, or "
                'loss_scope = "micro-batch" if that is meant'
            )

    def _compare(self, value: Tensor, whole: Part, parts: list[Part]) -> None:
        weights = [
            float(part.samples if self._weigh is None else self._weigh(part.targets))
            for part in parts
        ]
        total = 1.0 if self._is_sum else math.fsum(weights)
        if not total:
            return
        pairs = [pair for pair in zip(parts, weights, strict=True) if pair[1]]
        shares = [1.0 if self._is_sum else weight / total for _, weight in pairs]
        values = [self._value(part) for part, _ in pairs]
        mean = sum(each * share for each, share in zip(values, shares, strict=True))
        assert isinstance(mean, Tensor)
        rounding = self._rounding(value, whole)
        largest = max(*(abs(each.item()) for each in (value, *values)), LEAST)
        # NaN, if one of them is: then the step fails by itself
        if abs(value.item() - mean.item()) > rounding * largest:
            raise ConfigError(
                f"{self._name} depends on how a mini-batch is cut into micro-batches: it is "
                f"{value.item():.6g} of some samples together, and {mean.item():.6g} as a mean of "
                f"two parts of them; {self._ways_out}"
            )
        if self._is_trained and value.requires_grad and mean.requires_grad:
            leaves = [each for part in (whole, *parts) for each in pytree.tensors(part.outputs)]
            self._compare_gradients(value, mean, leaves, rounding)

    def _compare_gradients(
        self, value: Tensor, mean: Tensor, outputs: Sequence[Tensor], rounding: float
    ) -> None:
        leaves = [each for each in outputs if each.requires_grad and each.is_leaf]
        pairs = zip(
            torch.autograd.grad(value, leaves, allow_unused=True),
            torch.autograd.grad(mean, leaves, allow_unused=True),
            strict=True,
        )
        for of_whole, of_parts in pairs:
            if of_whole is None or of_parts is None:
                continue
            if not of_whole.numel():
                continue
            largest = max(float(of_whole.abs().max()), LEAST)
            if float((of_whole - of_parts).abs().max()) > rounding * largest:
                raise ConfigError(
                    f"the gradient of {self._name} depends on how a mini-batch is cut into "
                    f"micro-batches; {self._ways_out}"
                )

    def _rounding(self, value: Tensor, whole: Part) -> float:
        floating = [each for each in pytree.tensors(whole[:2]) if each.is_floating_point()]
        if self._is_low:
            return LOW_ROUNDING
        return max(ROUNDING.get(each.dtype, LOW_ROUNDING) for each in (value, *floating))

    def _value(self, part: Part) -> Tensor:
        # Copies: a loss may write to what it gets.
        value = self._call(*(pytree.map_tensors(Tensor.clone, each) for each in part[:2]))
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.reshape(())
        return torch.tensor(float(value))

    def _give_up(self, reason: str) -> None:
        self._is_given_up = True
        warnings.warn(
            f"{self._name} {reason}, so that of a mini-batch cannot be compared with those of its "
            "micro-batches",
            stacklevel=1,
        )


def own_tape() -> contextlib.AbstractContextManager[object]:
    """Keep what a backward needs in this block: around it a stage may drop it, see `recompute`.

    Only then: an operation that keeps its own result would keep itself as well, until a backward.
    """
    if not saves_otherwise():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept)


class Part(NamedTuple):
    """Some samples of a micro-batch."""

    outputs: Any
    targets: Any
    samples: int

    def rows(self, start: int, end: int) -> Part:
        sizes = start, end, self.samples, self._tokens
        return Part(rows(self.outputs, *sizes), rows(self.targets, *sizes), end - start)

    def copy(self) -> Part:
        """Return one of its own, which keeps nothing else in memory."""
        return Part(
            pytree.map_tensors(lambda each: _leaf(each.clone()), self.outputs),
            pytree.map_tensors(Tensor.clone, self.targets),
            self.samples,
        )

    @property
    def _tokens(self) -> int:
        """The first size of the targets, if a sample has several rows there and in the outputs."""
        sizes = [
            {each.shape[0] for each in pytree.tensors(tree) if each.dim()} for tree in self[:2]
        ]
        several = [size for size in sizes[0] & sizes[1] if size and size % self.samples == 0]
        return max(several, default=self.samples)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def rows(tree: Any, start: int, end: int, samples: int, tokens: int) -> Any:
    """Return the rows of some samples; a sample may have several, such as one per token."""

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] not in (samples, tokens):
            return tensor
        each = tensor.shape[0] // samples
        return tensor[start * each : end * each]

    return pytree.map_tensors(cut, tree)


def joined(one: Any, other: Any) -> Any:
    """Return the rows of both; what both have in common stays as it is."""
    following = iter(pytree.leaves(other))

    def join(leaf: Any) -> Any:
        beside = next(following)
        if beside is leaf or not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return torch.cat([leaf, beside])

    return pytree.map_leaves(join, one)
