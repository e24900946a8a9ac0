"""Options that the config has changed since a state was saved win over the saved ones.

torch takes all options of an optimizer and of a scheduler from the state that it loads: a lower
learning rate beside `--resume` would do nothing. The options right after both were built tell what
the config asked for then. If it asks for something else now, that holds. Everything else, such as
options that schedulers change, goes on as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from rpcmp.rpc.tensors import same_bits

Group: TypeAlias = dict[str, Any]


class Options(NamedTuple):
    """An optimizer's and its scheduler's options, without the state of parameters.

    Attributes:
        groups: the options of each parameter group, without its parameters.
        scheduler: its `state_dict()`; None without one.
    """

    groups: list[Group]
    scheduler: Any


class BuiltOptions(NamedTuple):
    """The options right after both were built.

    Attributes:
        asked: a hash of the config's sections for both.
        groups, scheduler: see Options.
    """

    asked: str
    groups: list[Group]
    scheduler: Any


def merge_options(
    saved: Options, then: BuiltOptions, now: BuiltOptions, known: Collection[str]
) -> Options:
    """Return `saved`, with the options that differ between `then` and `now` as they are now.

    A learning rate that a scheduler moves is scaled by the ratio of its initial values.

    Args:
        saved: the options when the state was saved.
        then, now: as built from the config at that time, and now.
        known: names of the optimizer's own options; the scheduler has added all others in `now`.
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
    """The learning rate under a scheduler; most schedulers keep the initial one in the group."""
    before, after = (group.get("initial_lr", group["lr"]) for group in (then, now))
    if _are_equal(before, after):
        return saved["lr"]
    return saved["lr"] * (after / before) if before else now["lr"]


def _merge(saved: Any, then: Any, now: Any) -> Any:
    """`saved` where `then` and `now` are equal, and `now` elsewhere, recursively."""
    if _are_equal(then, now):
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


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two trees are equal. Those from a file have lists instead of other sequences."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(_are_equal(one[key], other[key]) for key in one)
    if _are_lists(one, other):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    is_nan = one != one and other != other
    return type(one) is type(other) and (is_nan or bool(one == other))
