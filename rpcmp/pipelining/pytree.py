"""Nested tuples, lists and dicts of tensors: mini-batches, micro-batches, outputs of stages.

A leaf is anything that is not a tuple, list or dict. Named tuples keep their type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indices from the root of a tree to a leaf."""


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of `tree`, depth first, dicts in insertion order."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        yield tree
        return
    for child in tree:
        yield from leaves(child)


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
