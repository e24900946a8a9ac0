"""What the config has changed since a state was saved wins over what was saved.

torch takes all options of an optimizer and of a scheduler from the state that it loads: a lower
learning rate beside `--resume` would do nothing. What both were when they had just been built says
what the config had asked for then. Where it asks for something else now, that holds; all else, such
as what schedulers move, goes on as it was.

Whether tensors are the same, bit for bit: minus zero is not zero, not-a-number is itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether both are of one dtype and shape and have the same bits, on whichever devices."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = [
        tensor.detach().to(one.device).contiguous().reshape(-1).view(torch.uint8)
        for tensor in (one, other)
    ]
    return torch.equal(*bits)


Group: TypeAlias = dict[str, Any]


class Options(NamedTuple):
    """What an optimizer and its scheduler are, but for what is kept of each parameter.

    Attributes:
        groups: the options of each parameter group, without its parameters.
        scheduler: its `state_dict()`; None without one.
    """

    groups: list[Group]
    scheduler: Any


class BuiltOptions(NamedTuple):
    """What they were when they had just been built.

    Attributes:
        asked: a hash of what the config says of both.
        groups, scheduler: see Options.
    """

    asked: str
    groups: list[Group]
    scheduler: Any


def renewed(
    saved: Options, then: BuiltOptions, now: BuiltOptions, known: Collection[str]
) -> Options:
    """`saved`, with what differs between `then` and `now` as it is now.

    A learning rate that a scheduler moves is scaled by how much the one that it began with has
    changed.

    Args:
        saved: as it was in the end.
        then, now: as each config had it built.
        known: names of the optimizer's own options; what else `now` has, the scheduler has added.
    """
    if then.asked == now.asked or len(saved.groups) != len(now.groups):
        return saved
    is_moved = then.scheduler is not None and now.scheduler is not None
    groups = [
        _group(*each, known, is_moved)
        for each in zip(saved.groups, then.groups, now.groups, strict=True)
    ]
    scheduler = _merge(saved.scheduler, then.scheduler, now.scheduler)
    if isinstance(scheduler, dict) and "_last_lr" in scheduler:
        scheduler = {**scheduler, "_last_lr": [group.get("lr") for group in groups]}
    return Options(groups, scheduler)


def _group(saved: Group, then: Group, now: Group, known: Collection[str], is_moved: bool) -> Group:
    added = {key: value for key, value in now.items() if key not in then and key not in known}
    kept = {
        key: _merge(value, then[key], now[key]) if key in then and key in now else value
        for key, value in saved.items()
    }
    if is_moved and all("lr" in group for group in (saved, then, now)):
        kept["lr"] = _moved(saved, then, now)
    return {**added, **kept}


def _moved(saved: Group, then: Group, now: Group) -> Any:
    """A scheduler's learning rate; most of them keep the one that they began with."""
    began, begins = (group.get("initial_lr", group["lr"]) for group in (then, now))
    if _is_same(began, begins):
        return saved["lr"]
    return saved["lr"] * (begins / began) if began else now["lr"]


def _merge(saved: Any, then: Any, now: Any) -> Any:
    """`saved` where `then` and `now` are the same, `now` elsewhere; deep."""
    if _is_same(then, now):
        return saved
    if all(isinstance(tree, Mapping) for tree in (saved, then, now)) and set(then) == set(now):
        return {
            key: _merge(value, then[key], now[key]) if key in now else value
            for key, value in saved.items()
        }
    if _are_lists(saved, then, now) and len(saved) == len(then) == len(now):
        merged = [_merge(*each) for each in zip(saved, then, now, strict=True)]
        return tuple(merged) if isinstance(saved, tuple) else merged
    return now


def _are_lists(*trees: Any) -> bool:
    return all(isinstance(tree, Sequence) and not isinstance(tree, str) for tree in trees)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two trees are equal; a file's have lists where there were other sequences."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return are_equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(_is_same(one[key], other[key]) for key in one)
    if _are_lists(one, other):
        return len(one) == len(other) and all(map(_is_same, one, other))
    is_nan = one != one and other != other
    return type(one) is type(other) and (is_nan or bool(one == other))
