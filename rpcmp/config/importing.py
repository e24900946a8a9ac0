"""Resolve "module:callable" names from a config, under an allow list if there is one.

A host that was started with `--allow` or `--no-code` has an allow list. Under it, a name leads
through modules of the list to a function or class that is defined in one of them, and not to
objects that such a module merely imports. `__module__` names the defining module; only code of an
allowed module could forge its own, and that code is trusted. A decorated function belongs to the
module that `functools.wraps` copies. Objects without a trustworthy `__module__` are refused:
instances, `functools.partial`, functions written in C.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from rpcmp.config.types import Factory
from rpcmp.errors import FactoryError, RpcmpError, did_you_mean, nearest, one_line, suggest

_MODELS = frozenset({"layers", "dataset", "loss", "entropy_ratio", "ink_accuracy"})

BUILT_IN = {
    "torch.nn": frozenset({"Module"}),
    "torch.nn.functional": frozenset({"function"}),
    "torch.optim": frozenset({"Optimizer"}),
    "torch.optim.lr_scheduler": frozenset({"LRScheduler"}),
    "rpcmp.losses": frozenset({"causal_lm", "masked_lm", "tokens", "next_tokens"}),
    "rpcmp.metrics": frozenset({"accuracy"}),
    "rpcmp.examples.branches": _MODELS | {"Module"},
    "rpcmp.examples.digits": _MODELS,
    "rpcmp.examples.encoder_decoder": _MODELS | {"Module"},
    "rpcmp.examples.hybrid_devices": _MODELS | {"Module"},
    "rpcmp.examples.residual_ddp": _MODELS | {"Module"},
    "rpcmp.examples.resnet50": _MODELS,
    "rpcmp.examples.spirals": _MODELS | {"Module"},
    "rpcmp.examples.stdlib_gpt": _MODELS,
    "rpcmp.examples.two_parts": _MODELS | {"Module"},
    "rpcmp.examples.two_towers": _MODELS | {"Module"},
    "rpcmp.examples.unet": _MODELS | {"Module"},
}
"""What every host allows, by module: names, and base classes of allowed classes. None of it
opens a file that its arguments name, or runs a program; `rpcmp.examples.llama` and `finetune`
may do both."""


class AllowList:
    """The callables that jobs may use: BUILT_IN and the contents of some modules.

    Args:
        prefixes: the modules; their submodules are allowed as well.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = tuple(prefixes)

    def has_module(self, module: object) -> bool:
        return self._is_below(module) or module in BUILT_IN

    def find(self, module: str, attribute: str) -> Callable[..., Any]:
        """Return the object "module:attribute"; imports only allowed modules."""
        for step in (*module.split("."), *attribute.split(".")):
            if not step.isidentifier() or step.startswith("__"):
                raise FactoryError(f"{step!r} is not a name that a job may use")
        if not self.has_module(module):
            raise FactoryError(self._not_here(f"the module {module!r}"))
        if not self._is_below(module):
            return _built_in(module, attribute)
        target: Any = self._imported(module)
        for step in attribute.split("."):
            target = self._step(target, step)
        if not callable(target):
            raise FactoryError(f"{attribute!r} is a module")
        allowed: Callable[..., Any] = target
        return allowed

    def _is_below(self, module: object) -> bool:
        if not isinstance(module, str):
            return False
        return any(f"{module}.".startswith(f"{prefix}.") for prefix in self._prefixes)

    def _imported(self, module: str) -> ModuleType:
        parts = module.split(".")
        names = [".".join(parts[: count + 1]) for count in range(len(parts))]
        for name in filter(self._is_below, names):
            found = import_module(name)
            if not self._is_below(getattr(found, "__name__", None)):
                raise FactoryError(self._not_here(f"{name!r}, which is another module,"))
        return import_module(module)

    def _step(self, owner: object, name: str) -> object:
        """Return an attribute of an allowed module or class; it must be allowed itself."""
        if isinstance(owner, ModuleType):
            found = defined = getattr(owner, name)  # may be imported only now
            if isinstance(found, ModuleType) and self._is_below(found.__name__):
                return found
        elif isinstance(owner, type):
            raw = inspect.getattr_static(owner, name)
            defined = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
            found = getattr(owner, name) if isinstance(defined, FunctionType | type) else raw
        else:
            raise FactoryError(f"{name!r} is an attribute of {type(owner).__name__}")
        if isinstance(defined, ModuleType):
            raise FactoryError(self._not_here(f"the module {defined.__name__!r}"))
        if not isinstance(defined, FunctionType | type):
            what = f"{name!r} is {type(defined).__name__}, not a function or a class"
            raise FactoryError(f"{what}: write a function around it")
        if not self._is_below(defined.__module__):
            raise FactoryError(self._not_here(f"{defined.__module__}.{defined.__qualname__}"))
        return found

    def _not_here(self, what: str) -> str:
        given = f", and --allow adds {', '.join(self._prefixes)}" if self._prefixes else ""
        return (
            f"{what} is not allowed by this host, which allows torch.nn, torch.optim, "
            f"rpcmp.losses, rpcmp.metrics and rpcmp.examples{given}"
        )


def import_module(name: str) -> ModuleType:
    """Import a module; what its file draws meanwhile is the same in every process.

    `TABLE = torch.randn(4)` would be another one in each stage, and after each fault. Generators go
    on as they were. Files that this one imports draw what follows, so packages come first.
    """
    for package in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
        _imported_alone(package)
    return _imported_alone(name)


def _imported_alone(name: str) -> ModuleType:
    if name in sys.modules or "torch" not in sys.modules:  # such a process computes nothing
        return importlib.import_module(name)
    import numpy.random
    import torch

    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    seed = zlib.crc32(name.encode())  # another one for each file
    random.seed(seed)
    numpy.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _built_in(module: str, attribute: str) -> Callable[..., Any]:
    found: Any = getattr(importlib.import_module(module), attribute, None)
    if not attribute.startswith("_") and _is_built_in(module, attribute, found):
        built_in: Callable[..., Any] = found
        return built_in
    raise FactoryError(f"{attribute!r} is not an allowed name of {module}")


def _is_built_in(module: str, name: str, found: object) -> bool:
    from torch import nn, optim

    kinds = BUILT_IN[module]
    home = getattr(found, "__module__", None)
    if isinstance(found, FunctionType):
        return home == module and bool(kinds & {name, "function"})
    if not isinstance(found, type) or not isinstance(home, str):
        return False
    bases: dict[str, tuple[type, str]] = {
        "torch.nn": (nn.Module, "torch.nn.modules."),
        "torch.optim": (optim.Optimizer, "torch.optim."),
        "torch.optim.lr_scheduler": (optim.lr_scheduler.LRScheduler, f"{module}."),
    }
    base, below = bases.get(module, (nn.Module, f"{module}."))
    return base.__name__ in kinds and issubclass(found, base) and f"{home}.".startswith(below)


_lists: list[AllowList] = []
"""The allow list; empty if there is none and every name is allowed."""


def set_allow_list(prefixes: Sequence[str] | None) -> None:
    """Allow only BUILT_IN and these modules in this process; None: everything."""
    _lists[:] = [] if prefixes is None else [AllowList(prefixes)]


def is_restricted() -> bool:
    """Whether this process runs nothing but what an allow list has."""
    return bool(_lists)


def filter_allowed(modules: Iterable[str]) -> list[str]:
    """Return the modules among these that a job's callables may come from."""
    return [module for module in modules if all(allowed.has_module(module) for allowed in _lists)]


def resolve(name: str, what: str) -> Callable[..., Any]:
    """Return the object named "module:callable"; `what` is the config key that names it."""
    module_name, _, attribute = name.partition(":")
    try:
        for allowed in _lists:
            return allowed.find(module_name, attribute)
        target: Any = import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except FactoryError as error:
        raise FactoryError(
            f"{what} = {name!r} is refused by a server that was started with --allow or --no-code: "
            f"{error}"
        ) from error
    except (Exception, SystemExit) as error:  # sys.exit() in a module must not end this process
        raise FactoryError(
            f"{what} = {name!r} does not import: {explain_error(error)}"
            f"{_nearest_callable(error, module_name)}"
        ) from error
    if not callable(target):
        raise FactoryError(f"{what} = {name!r} is {type(target).__name__}, not callable")
    resolved: Callable[..., Any] = target
    return resolved


def _nearest_callable(error: BaseException, module: str) -> str:
    """Return the end of an error that suggests a callable of a module instead of a missing one."""
    found = sys.modules.get(module)
    if found is None or not isinstance(error, AttributeError) or error.obj is not found:
        return ""
    names = [name for name, value in vars(found).items() if callable(value)]
    return did_you_mean(nearest(error.name or "", names))


def resolve_factory(factory: Factory, what: str, num_args: int = 0) -> Callable[..., Any]:
    """Return the factory's callable, after checking that it takes the keyword arguments."""
    target = resolve(factory.callable, what)
    known = _keywords(target, num_args)
    for key in factory.kwargs:
        if known is not None and key not in known:
            raise FactoryError(
                f"{what} = {factory.callable!r} got an unexpected keyword argument {key!r}"
                f"{suggest(key, known)}"
            )
    return target


def _keywords(target: Callable[..., Any], num_args: int) -> list[str] | None:
    """Return the names of the arguments after the first `num_args`; None if it takes any."""
    try:
        # A decorator may take more than the function that it wraps, so its own signature counts.
        parameters = inspect.signature(target, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [each.name for each in named if each not in positional[:num_args]]


def create(factory: Factory, what: str, *args: Any) -> Any:
    """Call the factory's callable with `args` and the config's keyword arguments."""
    target = resolve_factory(factory, what, len(args))
    try:
        return target(*args, **factory.kwargs)
    except RpcmpError:
        raise
    except (Exception, SystemExit) as error:  # as in `resolve`
        raise FactoryError(
            f"{what} = {factory.callable!r} failed: {explain_error(error)}"
        ) from error


def load_function(factory: Factory, what: str) -> Callable[..., Any]:
    """Return a function of tensors, such as a loss or a metric.

    A class (torch.nn:CrossEntropyLoss) is built with the keyword arguments and its instance called;
    a function gets the keyword arguments in every call.
    """
    target = resolve(factory.callable, what)
    if isinstance(target, type):
        instance: Callable[..., Any] = create(factory, what)
        return instance
    return functools.partial(resolve_factory(factory, what), **factory.kwargs)


def explain_error(error: BaseException) -> str:
    """Return the error in one line, then the part of its traceback in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if "importlib" not in frame.filename][1:]
    lines = "".join(traceback.format_list(user)).rstrip()
    return f"{one_line(error)}\n{lines}" if lines else one_line(error)


def held_by(function: Any) -> Iterator[Any]:
    """Yield what a callable has: attributes, what it is a method of, arguments, closure, globals.

    Of the globals those whose names its code has. Of lists, dicts and namespaces their values, too.
    """
    for each in _held_by(function):
        yield each
        found = vars(each) if isinstance(each, SimpleNamespace) else each
        if isinstance(found, list | tuple | dict):
            yield from list(found.values() if isinstance(found, dict) else found)[:MAX_HELD]


def _held_by(function: Any) -> Iterator[Any]:
    yield from vars(function).values() if hasattr(function, "__dict__") else ()
    yield getattr(function, "__self__", None)
    if isinstance(call := vars(type(function)).get("__call__"), FunctionType):
        yield from _held_by(call)
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *_held_by(function.func))
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents
    if isinstance(function, FunctionType):
        yield from function.__defaults__ or ()
        for name in sorted(names_in(function.__code__)):
            yield function.__globals__.get(name)


MAX_HELD = 1000


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that code has, with that of functions within."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names}.union(*map(names_in, inner))
