"""The state of an optimizer by parameter names, read and loaded.

torch's `state_dict` numbers the parameters in the order of the groups; a file has their names. This
works for any object with `param_groups`, `step`, `state_dict` and `load_state_dict`. It differs
from plain `load_state_dict` in three points:

- A group must have the options that the optimizer was built with; loading may add others.
- Every tensor, however deep, keeps its dtype. torch casts all floating-point tensors to the dtype
  of their parameter, and breaks strings and named tuples.
- State beside the parameters is restored as well: other keys of the state, other entries of the
  `state_dict` of an optimizer around another, and attributes that steps have changed.

torch takes all options of an optimizer and of a scheduler from the state that it loads: a lower
learning rate beside `--resume` would do nothing. `merge_options` lets those win that the config has
changed since the state was saved: what it asks for now is compared to the options right after both
were built then. Everything else, such as options that schedulers change, stays as it was saved.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rpcmp.errors import CheckpointError, ConfigError
from rpcmp.rpc.tensors import encode_tree, same_bits


@functools.cache
def _torchs_own() -> set[str]:
    """Attributes of every optimizer; those that matter are in its `state_dict`."""
    one = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    return {*vars(one), "step", "_opt_called"}  # set by a scheduler, which wraps `step`


_KERNELS = ("fused", "foreach", "capturable")
"""Options that choose the implementation of a step, not its rule."""

_CONSTANTS = (torch.device, Enum, bytes, complex, logging.Logger)
"""Types that no step changes."""


Group = dict[str, Any]


class KeptState(NamedTuple):
    """The state of an optimizer.

    Attributes:
        state: by parameter.
        groups: the options of each parameter group, without its parameters.
        aside: state beside the parameters, or None. Its "names" lists the parameters, if it only
            fits these.
    """

    state: dict[str, Any]
    groups: list[dict[str, Any]]
    aside: Any = None


class OptimizerState:
    """Reads and loads the state of one optimizer.

    Args:
        optimizer: before its first step.
        named: its parameters, by name.
        where: names the stage in errors.

    Attributes:
        where: see above.
        parameters: by name.
        defaults: the options that it was built with.
    """

    def __init__(self, optimizer: Any, named: Mapping[str, Tensor], where: str) -> None:
        self._optimizer = optimizer
        self.parameters = dict(named)
        self.where = where
        names = {id(parameter): name for name, parameter in named.items()}
        try:
            self._names = [
                names[id(parameter)]
                for group in optimizer.param_groups
                for parameter in group["params"]
            ]
        except (AttributeError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{where}: {self.kind} keeps its parameters in no usual form (`param_groups`, "
                "each with the `params` that it was given), which checkpoints need"
            ) from error
        self.defaults = dict(getattr(optimizer, "defaults", {}))
        self._built = copy.deepcopy(self._attributes())

    def read(self) -> KeptState:
        """Return the current state; tensors are not copied."""
        whole = self._whole()
        state: dict[str, Any] = {}
        beside: dict[Any, Any] = {}
        for key, value in whole["state"].items():
            is_index = type(key) is int and 0 <= key < len(self._names)
            if is_index:
                state[self._names[key]] = value
            else:
                beside[key] = value
        aside = {
            "state": beside,
            "more": {k: v for k, v in whole.items() if k not in ("state", "param_groups")},
            "attributes": self._changed(),
        }
        if not any(aside.values()):
            return KeptState(state, self.groups())
        # A collection may have an entry for each parameter, and then fits no other cut.
        collections = (Tensor, Mapping, list, tuple)
        has_some = any(isinstance(v, collections) for part in aside.values() for v in part.values())
        names = self._names if has_some else None
        return KeptState(state, self.groups(), {**aside, "names": names})

    def groups(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def load(self, kept: KeptState) -> None:
        """Load a state."""
        own = self._whole()
        groups = self._own_kernels(kept.groups, own["param_groups"])
        self._require_shapes(kept.state, groups)
        aside = kept.aside or {"state": {}, "more": {}, "attributes": {}}
        numbered = {i: kept.state[name] for i, name in enumerate(self._names) if name in kept.state}
        self._optimizer.load_state_dict(
            {
                **aside["more"],
                "state": {**numbered, **aside["state"]},
                "param_groups": groups,
            }
        )
        for key, value in aside["attributes"].items():
            setattr(self._optimizer, key, value)
        self._undo_casts(kept.state)
        self._lay_out()

    def hidden(self) -> dict[str, Any]:
        """Return attributes that no file can hold.

        Without code and constants, and without objects that have a `state_dict`, which the
        optimizer's own may contain.
        """
        return {
            key: value
            for key, value in self._own.items()
            if not isinstance(value, _CONSTANTS)
            and not callable(value)
            and not hasattr(value, "state_dict")
            and not _is_plain(value)  # last, because it visits the whole tree
        }

    @property
    def kind(self) -> str:
        return type(self._optimizer).__name__

    def _whole(self) -> Mapping[str, Any]:
        whole: Mapping[str, Any] = self._optimizer.state_dict()
        if not {"state", "param_groups"} <= set(whole):
            raise ConfigError(
                f"{self.where}: the state_dict of {self.kind} has {', '.join(map(repr, whole))}: "
                "it needs 'state' and 'param_groups' as torch.optim.Optimizer has them, for an "
                "optimizer around another those of the inner one, and may have more"
            )
        return whole

    def _attributes(self) -> dict[str, Any]:
        return {key: value for key, value in self._own.items() if self._can_store(value)}

    @property
    def _own(self) -> dict[str, Any]:
        """Attributes that torch's optimizers do not have."""
        attributes = getattr(self._optimizer, "__dict__", {})
        return {key: value for key, value in attributes.items() if key not in _torchs_own()}

    def _can_store(self, value: Any) -> bool:
        """Whether a file can hold it: it is plain, and contains no parameter."""
        tensors: dict[str, Tensor] = {}
        if not _is_plain(value, tensors):
            return False
        own = {parameter.data_ptr() for parameter in self.parameters.values()} - {0}
        return all(tensor.data_ptr() not in own for tensor in tensors.values())

    def _changed(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in self._attributes().items()
            if key not in self._built or not same(value, self._built[key])
        }

    def _own_kernels(
        self, groups: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """`groups` for this optimizer's parameters and its own choice of kernels.

        An optimizer of another kind would miss options in its next step.
        """
        if len(groups) != len(own):
            raise ConfigError(
                f"the optimizer state of {self.where} has {len(groups)} parameter groups, and "
                f"{self.kind} has {len(own)} now: keep the `groups` of the optimizer"
            )
        merged = []
        for group, own_group in zip(groups, own, strict=True):
            stays = {key: v for key, v in own_group.items() if _is_own(key, own_group, group)}
            options = {**group, **stays}
            if missing := [key for key in self.defaults if key not in options]:
                raise ConfigError(
                    f"the optimizer state of {self.where} is another optimizer's than "
                    f"{self.kind}'s: it has no {', '.join(missing)}"
                )
            merged.append({**options, "params": own_group["params"]})
        return merged

    def _require_shapes(
        self, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Check shapes for a fused kernel, which would write past the end of a smaller state."""
        if not any(group.get("fused") for group in groups):
            return
        for name, parameter in self.parameters.items():
            for key, value in state.get(name, {}).items():
                fits = key == "step" or not isinstance(value, Tensor)
                if not fits and value.shape != parameter.shape:
                    raise CheckpointError(
                        f"{key!r} of parameter {name!r} of {self.where} has shape "
                        f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}: it is "
                        "another model's, or damaged; resume from another checkpoint"
                    )

    def _undo_casts(self, state: Mapping[str, Any]) -> None:
        states = getattr(self._optimizer, "state", {})
        for name, saved in state.items():
            if (parameter := self.parameters.get(name)) is not None and parameter in states:
                states[parameter] = _as_saved(saved, states[parameter])

    def _lay_out(self) -> None:
        """Give loaded tensors the strides of their parameter, as a fused kernel needs.

        The kernel walks through their memory in parallel, and files and messages keep no strides.
        State that is not channels-last, as its parameter is, would be paired with other elements,
        and an expanded tensor has less memory than its shape suggests.
        """
        if not any(group.get("fused") for group in self._optimizer.param_groups):
            return
        for parameter in self.parameters.values():
            state = self._optimizer.state[parameter]
            for key, value in state.items():
                is_like_it = isinstance(value, Tensor) and value.shape == parameter.shape
                if is_like_it and value.stride() != parameter.stride():
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal, their tensors bit for bit."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    if str(encode_tree(one, tensors)) != str(encode_tree(other, others)):  # NaN is NaN
        return False
    return all(same_bits(tensors[name], others[name]) for name in tensors)


def _is_plain(value: Any, tensors: dict[str, Tensor] | None = None) -> bool:
    """Whether a file can hold a tree. Adds its tensors to `tensors`."""
    try:
        encode_tree(value, {} if tensors is None else tensors)
    except TypeError:
        return False
    return True


def _is_own(key: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether an option stays: it chooses a kernel, or is an enum, which files have plain."""
    if key in _KERNELS:
        return True
    return isinstance(own[key], Enum) and key in saved and bool(own[key] == saved[key])


def _as_saved(saved: Any, loaded: Any) -> Any:
    """`saved` with its tensors on the devices of those in `loaded`, into which torch cast them."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if saved.dtype is loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        return {
            key: _as_saved(saved[key], value) if key in saved else value
            for key, value in loaded.items()
        }
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple):
        if len(saved) == len(loaded):
            pairs = zip(saved, loaded, strict=True)
            return type(saved)(_as_saved(*pair) for pair in pairs)
        return loaded
    return saved if isinstance(saved, str) else loaded


class BuiltOptions(NamedTuple):
    """The options of an optimizer and its scheduler right after both were built."""

    asked: str  # a hash of the config's sections for both
    groups: list[Group]
    scheduler: Any


def merge_options(
    saved: list[Group],
    scheduler: Any,
    then: BuiltOptions,
    now: BuiltOptions,
    known: Collection[str],
) -> tuple[list[Group], Any]:
    """Return the saved options of the groups and the scheduler, changed as `now` is from `then`.

    A learning rate that a scheduler moves is scaled by the ratio of its initial values.

    Args:
        saved, scheduler: the options when the state was saved.
        then, now: as built from the config at that time, and now.
        known: names of the optimizer's own options; the scheduler has added all others in `now`.
    """
    if then.asked == now.asked or len(saved) != len(now.groups):
        return saved, scheduler
    is_moved = then.scheduler is not None and now.scheduler is not None
    groups = [
        _group(*each, known, is_moved) for each in zip(saved, then.groups, now.groups, strict=True)
    ]
    scheduler = _merge(scheduler, then.scheduler, now.scheduler)
    if isinstance(scheduler, dict) and "_last_lr" in scheduler:
        scheduler = {**scheduler, "_last_lr": [group.get("lr") for group in groups]}
    return groups, scheduler


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
