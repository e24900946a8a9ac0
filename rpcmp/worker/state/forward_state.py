"""What the forwards of a stage change besides its parameters: buffers, attributes, globals.

    training    an evaluation begins: copied      the evaluation ends: put back
    recompute   before the first forward: copied  put back for the second one, and what came after
    snapshots   what has changed is kept, as buffers are by a state dict

Attributes and globals are numbers, texts, tensors, and lists, dicts and sets of these, such as a
hidden state that is carried from mini-batch to mini-batch, or a counter. What is of another class,
such as a tokenizer, is taken for a constant.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from rpcmp.errors import CheckpointError
from rpcmp.pipelining import pytree
from rpcmp.worker.state.outer_variables import StatePlace
from rpcmp.worker.state.places import (
    Modules,
    Objects,
    is_new,
    parts_of,
    places_of,
)
from rpcmp.worker.state.values import (
    are_equal_tensors,
    content_of,
    given_back,
    is_equal,
    plain_of,
    refilled,
    stored,
)

log = logging.getLogger(__name__)


class StateCopy(NamedTuple):
    """What lay at a place, and a copy of its value; `Missing` if nothing did."""

    place: StatePlace
    value: Any
    content: Any

    @property
    def has_changed(self) -> bool:
        """Whether something else is there, also if it is equal."""
        return self.now is not self.value or self.has_new_value

    @property
    def has_new_value(self) -> bool:
        now = self.now
        if isinstance(now, Tensor) and isinstance(self.content, Tensor):  # without a copy
            return not are_equal_tensors(now, self.content)
        return not is_equal(plain_of(content_of(now)), plain_of(self.content))

    @property
    def now(self) -> Any:
        """What is there now."""
        return self.place.owner.get(self.place.key, MISSING)

    def put_back(self) -> None:
        owner, key = self.place.owner, self.place.key
        if self.value is MISSING:
            owner.pop(key, None)
        elif self.has_changed:
            owner[key] = refilled(self.value, self.content)


class _Missing:
    pass


MISSING = _Missing()


class ForwardState:
    """The buffers and attributes of some modules.

    Args:
        renormalized: also the embeddings that a forward scales down (`max_norm`).
        objects: others that have attributes, by name.

    Attributes:
        is_known: whether `learn` was called.
    """

    def __init__(
        self,
        modules: Modules,
        objects: Objects = (),
        renormalized: bool = False,
    ) -> None:
        self._parts, self._renormalized = parts_of(modules), renormalized
        self._objects = objects
        self._known: list[StatePlace] | None = None

    @property
    def is_known(self) -> bool:
        return self._known is not None

    def places(self) -> list[StatePlace]:
        """Return where all of it lies, or what is known to change."""
        places = self._all() if self._known is None else [*self._known]
        if self._renormalized:
            places += [
                StatePlace(f"{prefix}weight", part._parameters, "weight")
                for prefix, part in self._parts
                if getattr(part, "max_norm", None) is not None and "weight" in part._parameters
            ]
        return places

    def copy(self) -> list[StateCopy]:
        return [copied(place) for place in self.places()]

    def put_back(self, copies: Sequence[StateCopy]) -> None:
        """Give everything the value that it had when it was copied, and remove what is new.

        What is known to change is all that may be new, once that was learned.
        """
        for each in copies:
            each.put_back()
        if self._known is None:
            before = {each.place.id for each in copies}
            for place in self._all():
                if place.id not in before and not place.is_outer:  # what it stood for is lost
                    place.owner.pop(place.key, None)

    def learn(self, before: Sequence[StateCopy]) -> None:
        """Let later copies be of what has changed since these were made, in place or by another.

        Values are compared: batch normalization does not count versions of its buffers. So large
        constants, such as masks, are copied only once.
        """
        known = {each.place.id for each in before}
        self._known = [each.place for each in before if each.has_changed]
        self._known += [place for place in self._all() if place.id not in known]

    def _all(self) -> list[StatePlace]:
        return [*places_of(self._parts, self._objects)]


def is_filled_in(before: Any, now: Any) -> bool:
    """Whether nothing is another than before, but what was not there: a cache, a flag, a table.

    A cache may grow, and forget; a table is made again for longer inputs.
    """
    if before is None or (before is False and now is True):
        return True
    if isinstance(before, dict) and isinstance(now, dict):
        return all(is_filled_in(before[key], now[key]) for key in before.keys() & now.keys())
    if isinstance(before, Tensor | numpy.ndarray) and type(before) is type(now):
        return bool(before.shape != now.shape) or is_equal(before, now)
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(is_filled_in, before, now))
    return is_equal(before, now)


PROBED = 256
"""Elements of a parameter that are looked at for changes."""


class ParameterWatch:
    """Tells which parameter has changed since it was made, in its version or in some elements.

    The version alone does not show what is done to `parameter.data`.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self._named = dict(named)
        self._before = {name: _probe(each) for name, each in self._named.items()}

    def changed(self) -> str:
        """Return the name of the first that has changed; empty if none has."""
        for name, (version, elements) in self._before.items():
            now, now_elements = _probe(self._named[name])
            if now != version or not is_equal(now_elements, elements):
                return name
        return ""


def not_renormalized(
    named: Iterable[tuple[str, nn.Parameter]], modules: Iterable[nn.Module]
) -> dict[str, nn.Parameter]:
    """Return parameters, but for embeddings that a forward scales down (`max_norm`)."""
    scaled = {id(each.weight) for each in modules if getattr(each, "max_norm", None)}
    return {name: each for name, each in named if id(each) not in scaled}


def _probe(parameter: nn.Parameter) -> tuple[int, Tensor]:
    step = max(1, parameter.numel() // PROBED)
    return parameter._version, parameter.detach().reshape(-1)[::step].clone()


LOOKS = 3
"""Snapshots that look at all attributes; later ones at those that have changed until then."""


class ChangedAttributes:
    """What was changed since a stage was built of attributes and of buffers without a state dict.

    Args:
        device: of the stage.
        objects: others that have attributes, by name.
    """

    def __init__(self, modules: Modules, device: torch.device, objects: Objects = ()) -> None:
        self._parts, self._device, self._objects = parts_of(modules), device, objects
        stored = {prefix + name for prefix, module in modules for name in module.state_dict()}
        self._first = {
            place.id: copied(place)
            for place in places_of(self._parts, self._objects)
            if place.name not in stored
        }
        self._stored = stored
        self._changed: dict[tuple[str, int], StatePlace] = {}
        self._looks, self._told = 0, set[str]()

    def read(self) -> dict[str, Any]:
        """Return what has changed, by name: trees of tensors, numbers and texts."""
        if self._looks < LOOKS:
            self._looks += 1
            for place in places_of(self._parts, self._objects):
                first = self._first.get(place.id)
                if place.name not in self._stored and (first is None or first.has_changed):
                    self._changed[place.id] = place
            if self._looks == LOOKS:
                self._first.clear()
        found = {}
        for place in self._changed.values():
            value = place.owner.get(place.key)
            try:
                found[place.name] = stored(value)
            except TypeError as error:
                self._tell(place.name, str(error))
        return found

    def _tell(self, name: str, kind: str) -> None:
        if name not in self._told:
            self._told.add(name)
            log.warning(
                "the forward changes %r, where it keeps %s, which no snapshot can hold: after a "
                "fault it begins anew; keep tensors, numbers and texts, lists and dicts of them",
                name,
                kind,
            )

    def restore(self, values: Mapping[str, Any]) -> None:
        """Put back what `read` has returned, as far as it is of these modules.

        Raises:
            CheckpointError: it would change what no forward does.
        """
        known = {place.name: place for place in places_of(self._parts, self._objects)}
        for name, value in values.items():
            if (place := known.get(name) or self._new_place(name)) is None:
                continue  # of a layer that another stage has now
            if name in self._stored or not self._may_be(place, value):
                raise not_kept(name)
            self._changed[place.id] = place
            moved = pytree.map_tensors(lambda each: each.to(self._device), value)
            place.owner[place.key] = given_back(place.owner.get(place.key), moved)

    def _new_place(self, name: str) -> StatePlace | None:
        """Return where an attribute belongs that only a forward makes."""
        above, _, key = name.rpartition(".")
        owners = (part for prefix, part in self._parts if prefix == f"{above}." or prefix == above)
        part = next(owners, None)
        if part is None or not key.isidentifier():  # or a variable of a file that nothing reaches
            return None
        if not is_new(part, key):
            raise not_kept(name)
        return StatePlace(name, vars(part), key)

    def _may_be(self, place: StatePlace, value: Any) -> bool:
        """Whether a value may lie at a place: in that of a buffer only one like it."""
        if all(place.owner is not part._buffers for _, part in self._parts):
            return True
        there = place.owner[place.key]
        is_like = isinstance(value, Tensor) and (there is None or value.dtype == there.dtype)
        return is_like and (there is None or value.dim() == there.dim())


def not_kept(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name!r} in a snapshot is nothing that a forward of this model keeps: it is of another "
        "version of the model, or was forged"
    )


def copied(place: StatePlace) -> StateCopy:
    value = place.owner.get(place.key, MISSING)
    return StateCopy(place, value, content_of(value))
