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
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy.random
import torch
from torch import Tensor, nn

from rpcmp.pipelining import pytree
from rpcmp.worker.outer_variables import StatePlace, is_library, variables_of

OWN_FIELDS = frozenset(vars(nn.Module()))
"""Attributes that every module has: its parameters, its hooks, its mode."""

OWN_PREFIX = "_split_"
"""Of attributes of the layers of a module that was cut; see rpcmp.splitting.layer."""

log = logging.getLogger(__name__)

GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)

ATOMS = (type(None), bool, int, float, complex, str, bytes)
SEVERAL = (list, tuple, dict, set, deque)


class StateCopy(NamedTuple):
    """What lay at a place, and a copy of its value; `Missing` if nothing did."""

    place: StatePlace
    value: Any
    content: Any

    @property
    def has_changed(self) -> bool:
        """Whether something else is there, also if it is equal."""
        return self._now is not self.value or self.has_new_value

    @property
    def has_new_value(self) -> bool:
        now = self._now
        if isinstance(now, Tensor) and isinstance(self.content, Tensor):  # without a copy
            return not _are_equal_tensors(now, self.content)
        return not _is_equal(_plain_of(_content(now)), _plain_of(self.content))

    @property
    def _now(self) -> Any:
        return self.place.owner.get(self.place.key, MISSING)

    def put_back(self) -> None:
        owner, key = self.place.owner, self.place.key
        if self.value is MISSING:
            owner.pop(key, None)
        elif self.has_changed:
            owner[key] = _refilled(self.value, self.content)


class _Missing:
    pass


MISSING = _Missing()


Modules = Sequence[tuple[str, nn.Module]]
"""Modules with a prefix of their names, such as "encoder."; several may have the same."""


class Stateful(NamedTuple):
    """What may have a state: modules, and others that have attributes, by name."""

    modules: Modules
    objects: Sequence[tuple[str, Any]] = ()


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
        objects: Sequence[tuple[str, Any]] = (),
        renormalized: bool = False,
    ) -> None:
        self._parts, self._renormalized = _parts(modules), renormalized
        self._objects = objects
        self._known: list[StatePlace] | None = None

    @property
    def is_known(self) -> bool:
        return self._known is not None

    def copy(self) -> list[StateCopy]:
        """Return copies of all, or of what is known to change."""
        places = self._all() if self._known is None else [*self._known]
        if self._renormalized:
            places += [
                StatePlace(f"{prefix}weight", part._parameters, "weight")
                for prefix, part in self._parts
                if getattr(part, "max_norm", None) is not None and "weight" in part._parameters
            ]
        return [_copied(place) for place in places]

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
        return [*_all_places(self._parts, self._objects)]


class VariablesWatch:
    """Tells in the first two steps which variables outside of modules a stage's code changes.

    What is only filled in, as a cache is, has not changed.
    """

    def __init__(self, modules: Modules, objects: Sequence[tuple[str, Any]] = ()) -> None:
        self._parts, self._objects, self._left = _parts(modules), objects, 2
        self._before = self._contents()

    def look(self) -> dict[str, bool] | None:
        """Return whether each has changed since the last look, by name; None after two looks."""
        if not self._left:
            self._before = {}
            return None
        self._left -= 1
        before, self._before = self._before, self._contents()
        return {
            name: name in before and not _is_filled_in(before[name], now)
            for name, now in self._before.items()
        }

    def _contents(self) -> dict[str, Any]:
        places = _outer_places(self._parts, self._objects)
        return {each.name: _plain_of(_content(each.owner.get(each.key))) for each in places}


def _is_filled_in(before: Any, now: Any) -> bool:
    """Whether nothing is another than before, but what was not there."""
    if before is None:
        return True
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and _is_filled_in(each, now[key]) for key, each in before.items())
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_is_filled_in, before, now))
    return _is_equal(before, now)


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
            if now != version or not _is_equal(now_elements, elements):
                return name
        return ""


def watch_parameters(
    named: Iterable[tuple[str, nn.Parameter]], modules: Iterable[nn.Module]
) -> ParameterWatch:
    """Watch parameters, but for embeddings that a forward scales down (`max_norm`)."""
    scaled = {id(each.weight) for each in modules if getattr(each, "max_norm", None)}
    return ParameterWatch({name: each for name, each in named if id(each) not in scaled})


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

    def __init__(
        self, modules: Modules, device: torch.device, objects: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self._parts, self._device, self._objects = _parts(modules), device, objects
        stored = {prefix + name for prefix, module in modules for name in module.state_dict()}
        self._first = {
            place.id: _copied(place)
            for place in _all_places(self._parts, self._objects)
            if place.name not in stored
        }
        self._stored = stored
        self._changed: dict[tuple[str, int], StatePlace] = {}
        self._looks, self._told = 0, set[str]()

    def read(self) -> dict[str, Any]:
        """Return what has changed, by name: trees of tensors, numbers and texts."""
        if self._looks < LOOKS:
            self._looks += 1
            for place in _all_places(self._parts, self._objects):
                first = self._first.get(place.id)
                if place.name not in self._stored and (first is None or first.has_changed):
                    self._changed[place.id] = place
            if self._looks == LOOKS:
                self._first.clear()
        found = {}
        for place in self._changed.values():
            value = place.owner.get(place.key)
            try:
                found[place.name] = _stored(value)
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
        """Put back what `read` has returned, as far as it is of these modules."""
        known = {place.name: place for place in _all_places(self._parts, self._objects)}
        for name, value in values.items():
            if (place := known.get(name) or self._new_place(name)) is None:
                continue  # of a layer that another stage has now
            self._changed[place.id] = place
            _give_back(place, pytree.map_tensors(lambda each: each.to(self._device), value))

    def _new_place(self, name: str) -> StatePlace | None:
        """Return where an attribute belongs that only a forward makes."""
        if ":" in name:
            return None
        above, _, key = name.rpartition(".")
        owners = (part for prefix, part in self._parts if prefix == f"{above}." or prefix == above)
        part = next(owners, None)
        return None if part is None else StatePlace(name, vars(part), key)


def _parts(modules: Modules) -> list[tuple[str, nn.Module]]:
    return [
        (f"{prefix}{path}." if path else prefix, part)
        for prefix, module in modules
        for path, part in module.named_modules()
    ]


def _all_places(
    parts: Iterable[tuple[str, nn.Module]], objects: Iterable[tuple[str, Any]]
) -> Iterator[StatePlace]:
    parts = [*parts]
    yield from _places(parts)
    for name, value in objects:
        yield from _attributes(name, value)
    yield from _outer_places(parts, objects)


def _outer_places(
    parts: Iterable[tuple[str, nn.Module]], objects: Iterable[tuple[str, Any]]
) -> Iterator[StatePlace]:
    for place in variables_of(each for _, each in (*parts, *objects)):
        value = place.owner.get(place.key)
        if _is_plain(value) or not is_library(type(value)):
            for inner in _within(place, value):
                yield inner._replace(is_outer=True)


def _places(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[StatePlace]:
    for prefix, part in parts:
        for name in part._buffers:
            yield StatePlace(prefix + name, part._buffers, name)
        for name, value in vars(part).items():
            if name not in OWN_FIELDS and not name.startswith(OWN_PREFIX):
                yield from _within(StatePlace(prefix + name, vars(part), name), value)


def _within(place: StatePlace, value: Any, depth: int = 2) -> Iterator[StatePlace]:
    """Yield a place, or those of an object's attributes."""
    if _is_plain(value):
        yield place
    elif depth and not callable(value) and not isinstance(value, ModuleType | logging.Logger):
        yield from _attributes(place.name, value, depth - 1)


def _attributes(name: str, value: Any, depth: int = 1) -> Iterator[StatePlace]:
    for key, each in list(getattr(value, "__dict__", {}).items()):
        yield from _within(StatePlace(f"{name}.{key}", vars(value), key), each, depth)


def _is_plain(value: Any, depth: int = 4) -> bool:
    if isinstance(value, (*ATOMS, *GENERATORS, Tensor, numpy.ndarray, numpy.generic)):
        return not isinstance(value, nn.Parameter | random.SystemRandom)  # that has no state
    if not isinstance(value, SEVERAL) or not depth:
        return False
    inner = value.values() if isinstance(value, dict) else value
    return all(_is_plain(each, depth - 1) for each in inner)


def _stored(value: Any) -> Any:
    """Return a value as a tree of tensors, numbers and texts, which a snapshot can hold.

    Raises:
        TypeError: it is something else.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case numpy.generic():
            return value.item()
        case Tensor():
            return value.detach()
        case numpy.ndarray():
            return torch.from_numpy(value.copy())
        case dict():
            return {key: _stored(each) for key, each in value.items()}
        case tuple():
            return tuple(map(_stored, value))
        case list() | deque() | set():
            return [*map(_stored, value)]
    if isinstance(value, GENERATORS):
        return _stored(_state_of(value))
    raise TypeError(type(value).__name__)


def _give_back(place: StatePlace, value: Any) -> None:
    """Put what `_stored` has returned where it was, into what lies there if that is of a kind."""
    there = place.owner.get(place.key)
    if isinstance(there, numpy.random.RandomState):
        there.set_state(pytree.map_tensors(Tensor.numpy, value))
    elif isinstance(there, GENERATORS):
        _set_state(there, value)
    elif isinstance(there, numpy.ndarray):
        place.owner[place.key] = value.cpu().numpy()
    elif isinstance(there, deque | set):
        there.clear()
        (there.extend if isinstance(there, deque) else there.update)(value)
    else:
        place.owner[place.key] = value


def _state_of(generator: Any) -> Any:
    match generator:
        case numpy.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    match generator:
        case random.Random():
            generator.setstate(state)
        case numpy.random.Generator():
            generator.bit_generator.state = state
        case torch.Generator():
            generator.set_state(state.cpu())
        case _:
            generator.set_state(state)


def _copied(place: StatePlace) -> StateCopy:
    value = place.owner.get(place.key, MISSING)
    return StateCopy(place, value, _content(value))


def _content(value: Any) -> Any:
    """Return a copy of what a value holds, from which `_refilled` makes it again."""
    if isinstance(value, GENERATORS):
        return _content(_state_of(value))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, numpy.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: (each, _content(each)) for key, each in value.items()}
    if isinstance(value, SEVERAL):
        return [(each, _content(each)) for each in value]
    return value


def _plain_of(content: Any) -> Any:
    """Return a content without the objects that it was of."""
    if isinstance(content, dict):
        return {key: _plain_of(inner) for key, (_, inner) in content.items()}
    if isinstance(content, list):
        return [_plain_of(inner) for _, inner in content]
    return content


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two contents are equal, bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _are_equal_tensors(one, other)
    if isinstance(one, numpy.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return [*one] == [*other] and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other) or bool(one != one and other != other)  # NaN


def _are_equal_tensors(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    try:
        if one.layout is not torch.strided:
            return torch.equal(one.to_dense(), other.to_dense())
        bits = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
        return torch.equal(*bits)
    except (RuntimeError, NotImplementedError):  # quantized, for one: it counts as changed
        return False


def _refilled(value: Any, content: Any) -> Any:
    """Return an object with its former content."""
    if isinstance(value, GENERATORS):
        _set_state(value, _generator_state(value, content))
    elif isinstance(value, Tensor):
        value.data.copy_(content)  # a graph that has saved it is as it was, not invalid
    elif isinstance(value, numpy.ndarray):
        value[...] = content
    elif isinstance(value, dict):
        items = {key: _refilled(*pair) for key, pair in content.items()}
        value.clear()
        value.update(items)
    elif isinstance(value, tuple):
        for pair in content:
            _refilled(*pair)
    elif isinstance(value, set):
        value.clear()
        value.update(each for each, _ in content)
    elif isinstance(value, list | deque):
        several = [_refilled(*pair) for pair in content]
        value.clear()
        value.extend(several)
    return value


def _generator_state(generator: Any, content: Any) -> Any:
    """Return a state as the generator gives it: `_content` has taken it apart."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = _plain_of(content)
        return version, tuple(numbers), gauss
    if isinstance(generator, numpy.random.RandomState):
        return tuple(_plain_of(content))
    return _plain_of(content)
