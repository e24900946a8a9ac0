"""Cut a mini-batch into micro-batches, and join their results.

    50 samples, 7 micro-batches:  8 7 7 7 7 7 7        2 samples, 4 micro-batches:  1 1
                                                       of 2 samples at least:       2

Sizes of micro-batches differ by at most one sample, so no stage gets a straggler, and are never
less than the model needs: a small mini-batch is cut into fewer micro-batches. The losses are
weighted by samples, so with a mean loss the gradients add up to the whole mini-batch's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rpcmp.errors import ConfigError
from rpcmp.pipelining.pytree import describe, leaves_with_path, map_leaves, map_tensors, tensors

NEEDS_TWO = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)
"""Layers that a single sample may give one value per channel, which torch refuses to train with.

On larger maps it gives more, and torch trains; only the layer's input shows that, so both count.
"""


def sizes(num_samples: int, num_microbatches: int, smallest: int = 1) -> list[int]:
    """Return the samples in each micro-batch, the larger ones first.

    Args:
        smallest: the fewest samples per micro-batch, unless the mini-batch has fewer.
    """
    count = _count(num_samples, num_microbatches, smallest)
    return [len(samples_of(index, num_samples, count)) for index in range(count)]


def samples_of(microbatch: int, num_samples: int, num_microbatches: int) -> range:
    """Return the samples of one micro-batch, as `sizes` cuts them, in constant time.

    Raises:
        IndexError: there is no such micro-batch.
    """
    count = _count(num_samples, num_microbatches)
    if not 0 <= microbatch < count:
        raise IndexError(f"micro-batch {microbatch} of {count}")
    base, larger = divmod(num_samples, count)
    start = microbatch * base + min(microbatch, larger)
    return range(start, start + base + (microbatch < larger))


def _count(num_samples: int, num_microbatches: int, smallest: int = 1) -> int:
    if num_samples < 1:
        raise ConfigError("a mini-batch has no samples; is the dataset empty?")
    return max(1, min(num_samples // smallest, num_microbatches))


def smallest_for(modules: Iterable[nn.Module]) -> int:
    """Return the fewest samples of a micro-batch that `modules` can be trained with."""
    for module in modules:
        if getattr(module, "needs_two_samples", False):  # a layer that was cut out of a module
            return 2
        for part in module.modules():
            # In evaluation mode, a layer with running statistics needs only one.
            if isinstance(part, NEEDS_TWO) and (
                part.training or (part.running_mean is None and part.running_var is None)
            ):
                return 2
    return 1


def num_samples(batch: Any, what: str = "") -> int:
    """Return the size of the first dimension, which all tensors of `batch` must share."""
    names: dict[int, str] = {}
    for path, leaf in leaves_with_path(batch):
        name = ".".join(map(str, [what, *path] if what else path)) or "the batch"
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            raise ConfigError(
                f"{name} is {describe(leaf)}; a batch must be made of tensors whose first "
                "dimension counts the samples"
            )
        names.setdefault(leaf.shape[0], name)
    if len(names) != 1:
        sizes_found = ", ".join(f"{name}: {size}" for size, name in names.items())
        raise ConfigError(f"a batch needs one number of samples, not {sizes_found or 'none'}")
    return next(iter(names))


def split(batch: Any, num_microbatches: int, smallest: int = 1) -> list[Any]:
    """Cut `batch` along the first dimension of its tensors; see `sizes`."""
    count = _count(num_samples(batch), num_microbatches, smallest)
    return [cut(batch, count, microbatch) for microbatch in range(count)]


def join(parts: list[Any]) -> Any:
    """Concatenate trees of equal structure, tensor by tensor; the inverse of `split`.

    Of numbers without a dimension of samples it is the mean, each part weighted by its samples.

    Raises:
        ConfigError: such numbers differ, and have no mean.
    """
    columns = zip(*(leaves_with_path(part) for part in parts), strict=True)
    rows = [next((each.shape[0] for each in tensors(part) if each.dim()), 1) for part in parts]

    def joined(leaf: Any) -> Any:
        column = next(columns)
        values = [value for _, value in column]
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return torch.cat(values)
        if all(_is_same(value, leaf) for value in values):
            return leaf
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return sum(value * (n / sum(rows)) for value, n in zip(values, rows, strict=True))
        name = ".".join(map(str, column[0][0])) or "the output"
        raise ConfigError(
            f"{name} has no dimension of samples, and each of {len(parts)} micro-batches has "
            "another: leave it out of what the model returns in evaluation, or set "
            "num_microbatches = 1"
        )

    return map_leaves(joined, parts[0])


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other) or bool((one != one).all() and (other != other).all())
    return bool(one == other)


def cut(batch: Any, num_microbatches: int, microbatch: int) -> Any:
    """Return one slice of `batch`, as a contiguous copy.

    The offset of a view into its storage would decide which vector code a kernel takes, and with it
    the last bits of the result.
    """
    samples = samples_of(microbatch, num_samples(batch), num_microbatches)
    return map_tensors(
        lambda tensor: tensor[samples.start : samples.stop].clone(
            memory_format=torch.contiguous_format
        ),
        batch,
    )


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once, whatever the order.

    If `math.fsum` raises, return the sum that torch would: NaN for infinities of both signs, and
    infinity if the sum grows too large on the way.
    """
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
