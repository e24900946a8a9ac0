"""Nested tuples, lists and dicts of tensors: mini-batches, their micro-batches, outputs of stages.

A leaf is anything that is not a tuple, list or dict. Named tuples keep their type.

    50 samples, 7 micro-batches:  8 7 7 7 7 7 7        2 samples, 4 micro-batches:  1 1
                                                       of 2 samples at least:       2

Sizes of micro-batches differ by at most one sample, so no stage gets a straggler, and are never
less than the model needs: a small mini-batch is cut into fewer micro-batches. The losses are
weighted by samples, so with a mean loss the gradients add up to those of the whole mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from rpcmp.errors import ConfigError

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the root of a tree to a leaf."""


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of `tree`, depth first, dicts in insertion order."""
    for _, leaf in leaves_with_path(tree):
        yield leaf


def leaves_with_path(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from leaves_with_path(child, (*path, key))
    elif isinstance(tree, tuple | list):
        for index, child in enumerate(tree):
            yield from leaves_with_path(child, (*path, index))
    else:
        yield path, tree


def tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):  # by far the most frequent, several times a micro-batch
        return [tree]
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return `tree` with `function(leaf)` in place of each leaf, in the order of `leaves`."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, child) for key, child in tree.items()}
    if isinstance(tree, tuple | list):
        children = [map_leaves(function, child) for child in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*children)
        return tuple(children) if isinstance(tree, tuple) else children
    return function(tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`map_leaves` that leaves everything but tensors as it is."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def plain(tree: Any) -> Any:
    """Return `tree` with a dict in place of every other mapping, such as a UserDict."""

    def as_dict(leaf: Any) -> Any:
        return plain(dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return map_leaves(as_dict, tree)


def select(tree: Any, path: tuple[str, ...]) -> Any:
    """Return the part of `tree` at `path`; keys of tuples and lists are their indices.

    Raises:
        LookupError: there is no such part; the message describes what there is.
    """
    for key in path:
        if isinstance(tree, dict) and key in tree:
            tree = tree[key]
        elif isinstance(tree, tuple | list) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]
        else:
            raise LookupError(f"no part {key!r} in {describe(tree)}")
    return tree


def describe(tree: Any) -> str:
    """Describe the structure of `tree` for people: "{'image': float32[8, 1, 8, 8]}"."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {describe(child)}" for key, child in tree.items()) + "}"
    if isinstance(tree, tuple | list):
        return "(" + ", ".join(describe(child) for child in tree) + ")"
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    return type(tree).__name__


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
    """Concatenate trees of equal structure, tensor by tensor; the inverse of `split`."""
    columns = zip(*(leaves(part) for part in parts), strict=True)

    def joined(leaf: Any) -> Any:
        column = next(columns)
        return torch.cat(column) if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf

    return map_leaves(joined, parts[0])


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
