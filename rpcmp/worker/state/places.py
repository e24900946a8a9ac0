"""Where the forwards of modules may keep something: buffers, attributes, variables outside of them.

A module that another one hides from torch, in a list or an attribute of an attribute, is looked
into as well: nothing else finds its buffers, and nobody trains its parameters.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections import UserDict, UserList
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from rpcmp.splitting.side_effects import OWN_FIELDS, is_users_own
from rpcmp.worker.state.outer_variables import Attributes, StatePlace, is_library, variables_of
from rpcmp.worker.state.values import is_large, is_plain

OWN_PREFIX = "_split_"
"""Of attributes of the layers of a module that was cut; see rpcmp.splitting.layer."""

CODE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, functools.partial)

Modules = Sequence[tuple[str, nn.Module]]
"""Modules with a prefix of their names, such as "encoder."; several may have the same."""

Objects = Sequence[tuple[str, Any]]
"""Others that have attributes, by name."""


class Stateful(NamedTuple):
    """What may have a state: modules, and others that have attributes, by name."""

    modules: Modules
    objects: Objects = ()


def parts_of(modules: Modules) -> list[tuple[str, nn.Module]]:
    """Return modules and all that they have, each with the prefix of its names."""
    return [
        (f"{prefix}{path}." if path else prefix, part)
        for prefix, module in modules
        for path, part in module.named_modules()
    ]


def places_of(parts: Modules, objects: Objects) -> Iterator[StatePlace]:
    """Yield buffers, attributes and outer variables, as far as they may change."""
    return _places(_Look(parts), parts, objects)


def outer_places(parts: Modules, objects: Objects) -> Iterator[StatePlace]:
    """Yield the outer variables alone."""
    return (place for place in _outer(_Look(parts), parts, objects) if place.is_outer)


def reached_places(objects: Objects) -> Iterator[StatePlace]:
    """Yield the variables that functions reach, closures of their own included."""
    return _outer(_Look(()), (), objects)


def shared_places(name: str, value: Any) -> Iterator[StatePlace]:
    """Yield where a value, and what is inside of it, may change; or itself, if it is a place."""
    if isinstance(value, StatePlace):
        return iter([value._replace(name=name)])
    return _Look(()).into(StatePlace(name, {name: value}, name), value)


def hidden_parameters(parts: Modules, objects: Objects) -> dict[str, nn.Parameter]:
    """Return the parameters that modules reach and have not, by name."""
    look = _Look(parts)
    for _ in _places(look, parts, objects):
        pass
    return look.hidden


def _places(look: _Look, parts: Modules, objects: Objects) -> Iterator[StatePlace]:
    for prefix, part in parts:
        yield from look.into_module(prefix, part)
    for name, value in objects:
        yield from look.into_attributes(name, value)
    yield from _outer(look, parts, objects)


def _outer(look: _Look, parts: Modules, objects: Objects) -> Iterator[StatePlace]:
    for place in variables_of((*parts, *objects)):
        value = place.owner.get(place.key)
        if not is_large(value):
            for inner in look.into(place, value):
                yield inner._replace(is_outer=place.is_outer)


@functools.cache
def torchs_own(kind: type) -> frozenset[str]:
    """Return the attributes that torch's code sets in a module, as an LSTM's sizes and weights.

    Its forwards do not change them, and its kernels trust them: they come from no snapshot.
    """
    return OWN_FIELDS.union(
        each.argval
        for base in kind.__mro__
        if base.__module__.startswith("torch.") and base is not nn.Module
        for function in vars(base).values()
        if isinstance(function, FunctionType)
        for each in dis.get_instructions(function)
        if each.opname == "STORE_ATTR"
    )


def is_new(part: nn.Module, key: str) -> bool:
    """Whether a forward may have made an attribute that a module does not have yet."""
    kind: type = type(part)
    is_free = key not in torchs_own(kind) and key not in vars(part)
    return is_free and is_plain(inspect.getattr_static(kind, key, None))


class _Look:
    """Looks into values.

    Attributes:
        hidden: parameters of modules that are found and are none of those that it was given.
    """

    def __init__(self, parts: Modules) -> None:
        self.hidden: dict[str, nn.Parameter] = {}
        self._known = {id(part) for _, part in parts}
        self._known |= {id(each) for _, part in parts for each in part._parameters.values()}

    def into_module(self, prefix: str, part: nn.Module) -> Iterator[StatePlace]:
        for name in part._buffers:
            yield StatePlace(prefix + name, part._buffers, name)
        kind: type = type(part)
        own = torchs_own(kind)
        for name, value in list(vars(part).items()):
            if name not in own and not name.startswith(OWN_PREFIX):
                yield from self.into(StatePlace(prefix + name, vars(part), name), value)

    def into(
        self, place: StatePlace, value: Any, depth: int = 3, is_there: bool = True
    ) -> Iterator[StatePlace]:
        """Yield a place, or those of what is inside of its value.

        Args:
            is_there: whether it is the value of that place, and not of a container there.
        """
        try:
            is_state = is_plain(value)
        except Exception:  # an object of the user's that cannot even be looked at
            return
        match value:
            case _ if is_state:
                yield place
            case nn.Parameter():
                self._hide(place.name, value)
            case nn.Module():
                yield from self._into_hidden(place.name, value)
            case list() | tuple() | dict() if depth:
                items = value.items() if isinstance(value, dict) else enumerate(value)
                for key, each in list(items):
                    if not is_plain(each):
                        inner = place._replace(name=f"{place.name}.{key}")
                        yield from self.into(inner, each, depth - 1, is_there=False)
            case _ if depth and not _is_code(value):
                if is_there and is_users_own(type(value)):
                    yield place  # another object may be there afterwards
                yield from self.into_attributes(place.name, value, depth - 1)

    def into_attributes(self, name: str, value: Any, depth: int = 1) -> Iterator[StatePlace]:
        for key, each in _attributes_of(value):
            yield from self.into(StatePlace(f"{name}.{key}", vars(value), key), each, depth)
        slots = Attributes(value)
        for key in _slots_of(type(value)):
            if key in slots:
                yield from self.into(StatePlace(f"{name}.{key}", slots, key), slots[key], depth)

    def _into_hidden(self, name: str, module: nn.Module) -> Iterator[StatePlace]:
        for prefix, part in parts_of([(f"{name}.", module)]):
            if id(part) not in self._known:
                self._known.add(id(part))
                for key, each in part._parameters.items():
                    if each is not None:
                        self._hide(prefix + key, each)
                yield from self.into_module(prefix, part)

    def _hide(self, name: str, parameter: nn.Parameter) -> None:
        if id(parameter) not in self._known:
            self._known.add(id(parameter))
            self.hidden[name] = parameter


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    try:
        return [*vars(value).items()]
    except Exception:  # it has none, or a property of the user's stands in their place
        return []


def _slots_of(kind: type) -> Iterator[str]:
    if not is_library(kind):
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            names = [slots] if isinstance(slots, str) else list(slots)
            yield from (name for name in names if not name.startswith("__"))


def _is_code(value: Any) -> bool:
    """Whether something has no attributes that a forward would keep a state in.

    What can be called is of the user's own classes, or as large as a tokenizer.
    """
    if isinstance(value, SimpleNamespace | UserDict | UserList):
        return False
    return isinstance(value, CODE) or (
        not is_users_own(type(value)) if callable(value) else is_library(type(value))
    )
