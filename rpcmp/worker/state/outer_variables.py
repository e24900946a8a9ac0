"""Variables outside of modules that their forwards, or a loss, reach by name.

    calls = 0                   "models:calls", a global, of any file that is the user's
    class Scaled(nn.Module):
        seen = []               "models:Scaled.seen", of a class
        def forward(self, x):
            count()             functions, methods and hooks are followed, with their closures

Each process has its own: layers in two stages that count with the same one would each count alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from rpcmp.config import importing

log = logging.getLogger(__name__)

LIBRARIES = {*sys.stdlib_module_names, "numpy", "rpcmp", "torch"}
"""Packages whose variables are no part of what a user's code keeps."""

MOST = 1000
"""Functions that are followed."""

CONSTRUCTORS = ("__new__", "__init__", "__post_init__")

MOST_HELD = 100
"""Values of a container that are looked at for functions."""


class StatePlace(NamedTuple):
    """Where something lies that a forward may change: `owner[key]`; `name` is for people.

    Attributes:
        is_outer: whether it is one of this module's variables. Those have the same name in all
            processes, with a colon in it.
    """

    name: str
    owner: MutableMapping[str, Any]
    key: str
    is_outer: bool = False

    @property
    def id(self) -> tuple[str, int]:
        return self.key, id(getattr(self.owner, "target", self.owner))


class Attributes(MutableMapping[str, Any]):
    """The attributes of a class, a closure's cell, or an object with slots, as a mapping.

    Args:
        target: whose they are; mappings of the same target hold the same variables.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self.target, key)
        except Exception:  # of the user's __getattr__; ValueError: a cell is empty
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.target, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self.target, key)

    def __iter__(self) -> Iterator[str]:
        return iter(dir(self.target))

    def __len__(self) -> int:
        return len(dir(self.target))


def variables_of(callables: Iterable[tuple[str, Any]]) -> list[StatePlace]:
    """Return what modules, losses and functions reach; of no package in `LIBRARIES`.

    Args:
        callables: each with its name.
    """
    walk = _Walk()
    for name, each in callables:
        walk.follow(name, each)
    return [*walk.found.values()]


Step = tuple[FunctionType, str, bool, type | None]
"""A function on the way: how it was reached, whether all processes have that name, and the
class whose methods it may call."""


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, StatePlace] = {}
        self._seen: set[tuple[FunctionType, type | None]] = set()
        self._modules: set[str] = set()

    def follow(self, name: str, value: Any) -> None:
        """Go from a module or function to what it calls."""
        stack = [*_entries(name, value)]
        while stack and len(self._seen) < MOST:
            function, path, is_outer, kind = stack.pop()
            if (function, kind) not in self._seen:
                self._seen.add((function, kind))
                self._modules.clear()
                stack += self._reached(function, path, is_outer, kind)
        if stack:
            _tell_rest(name)

    def _reached(
        self, function: FunctionType, path: str, is_outer: bool, kind: type | None
    ) -> Iterator[Step]:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            place = StatePlace(f"{path}.{name}", Attributes(cell), "cell_contents", is_outer)
            yield from self._see(place, (), kind)
        defaults = function.__defaults__ or (), (function.__kwdefaults__ or {}).values()
        for key, held in zip(("__defaults__", "__kwdefaults__"), defaults, strict=True):
            if any(isinstance(each, list | dict | set) for each in held):  # def f(x, store=[])
                self._note(StatePlace(f"{path}.{key}", Attributes(function), key, is_outer))
        for key in [*vars(function)]:
            yield from self._see(StatePlace(f"{path}.{key}", vars(function), key, is_outer), ())
        module = function.__globals__.get("__name__", "")
        if _is_library(module):  # a decorator, which has the user's function in its closure
            return
        names = importing.names_in(function.__code__)
        for name in sorted(names & function.__globals__.keys()):
            place = StatePlace(f"{module}:{name}", function.__globals__, name, True)
            yield from self._see(place, names)
        for base in _classes_of(kind):
            yield from self._see_class(base, names, kind)

    def _see(
        self, place: StatePlace, names: Iterable[str], kind: type | None = None
    ) -> Iterator[Step]:
        """Note a variable, or yield the functions that it stands for."""
        value = place.owner.get(place.key)
        if _is_odd(value):
            return
        if functions := [*_functions_of(value)]:
            for each in functions:
                yield (each, place.name, place.is_outer, kind)
        elif isinstance(value, ModuleType):
            if not _is_library(value.__name__) and place.name not in self._modules:
                self._modules.add(place.name)  # two that import each other would never end
                own = vars(value)
                for name in sorted(own.keys() & names):
                    inner = StatePlace(f"{value.__name__}:{name}", own, name, True)
                    yield from self._see(inner, names)
        elif isinstance(value, type):
            yield from self._see_class(value, {*names, *CONSTRUCTORS}, value)
        else:
            self._note(place)
            its = type(value)
            for base in _classes_of(its):
                yield from self._see_class(base, {*names, "__call__"}, its)
            if isinstance(value, dict | list | tuple):
                for each in [*(value.values() if isinstance(value, dict) else value)][:MOST_HELD]:
                    for function in _functions_of(each):
                        yield (function, place.name, place.is_outer, None)

    def _note(self, place: StatePlace) -> None:
        self.found.setdefault(place.name, place)

    def _see_class(
        self, owner: type, names: Iterable[str], kind: type | None = None
    ) -> Iterator[Step]:
        for base in _classes_of(owner):
            for name in sorted(vars(base).keys() & names):
                place = StatePlace(_path_of(base, name), Attributes(base), name, True)
                yield from self._see(place, (), kind)


@functools.cache
def _tell_rest(name: str) -> None:
    log.warning(
        "code that %s calls has more than %d functions: what the others keep in variables outside "
        "of modules is not looked at",
        name,
        MOST,
    )


def _entries(name: str, value: Any) -> Iterator[Step]:
    """Yield the functions that a call of it calls."""
    if functions := [*_functions_of(value)]:
        kind = type(value.__self__) if isinstance(value, MethodType) else None
        yield from (_step(each, f"{name}{each.__name__}", kind) for each in functions)
        return
    while isinstance(value, functools.partial):  # of a class
        value = value.func
    kind = value if isinstance(value, type) else type(value)
    for base in _classes_of(kind):
        for method in CONSTRUCTORS if kind is value else ("__call__", "forward"):
            for each in _functions_of(vars(base).get(method)):
                yield (each, _path_of(base, method), True, kind)
    if isinstance(value, nn.Module):
        for hooks in (value._forward_pre_hooks, value._forward_hooks):
            for number, hook in hooks.items():
                yield from _entries(f"{name}hook {number}.", hook)
        for key, own in [*vars(value).items()]:
            if not key.startswith("__") and not _is_odd(own):  # self.act = function
                for each in _functions_of(own):
                    yield _step(each, f"{name}{key}", kind)


def _step(function: FunctionType, name: str, kind: type | None) -> Step:
    """Return a function that is reached through a layer, as `name`."""
    path = f"{function.__globals__.get('__name__')}:{function.__qualname__}"
    if "<locals>" in path:  # each layer has its own
        return function, name, False, kind
    return function, path, True, kind


def _is_odd(value: Any) -> bool:
    """Whether a property of the user's stands in the place of its class, and fails."""
    try:
        isinstance(value, ModuleType)
    except Exception:
        return True
    return False


def _path_of(kind: type, name: str) -> str:
    return f"{kind.__module__}:{kind.__qualname__}.{name}"


def _functions_of(value: Any) -> Iterator[FunctionType]:
    match value:
        case FunctionType():
            yield value
        case MethodType() | staticmethod() | classmethod():
            yield from _functions_of(value.__func__)
        case property():
            yield from _functions_of(value.fget)
        case functools.partial() | functools.cached_property():
            yield from _functions_of(value.func)
        case _ if callable(value):  # functools.cache
            yield from _functions_of(inspect.getattr_static(value, "__wrapped__", None))


def _classes_of(kind: type | None) -> list[type]:
    return [] if kind is None else [each for each in kind.__mro__ if not is_library(each)]


def is_library(kind: type) -> bool:
    """Whether a class is of a package whose objects have no attributes of the user's: a lock's."""
    return _is_library(kind.__module__)


def _is_library(name: str) -> bool:
    return name.partition(".")[0] in LIBRARIES
