"""Resolving "module:callable" names from a config."""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rpcmp.allowlist import AllowList
from rpcmp.errors import FactoryError, RpcmpError, one_line
from rpcmp.kinds import Factory
from rpcmp.suggestion import what_there_is

_lists: list[AllowList] = []
"""The allow list; empty where there is none, and anything may be named."""


def limit(prefixes: Sequence[str] | None) -> None:
    """Resolve only what an allow list has; see `rpcmp.allowlist`.

    Args:
        prefixes: modules that the list has besides what every list has; None: there is no list.
    """
    _lists[:] = [] if prefixes is None else [AllowList(prefixes)]


def allowed_among(modules: Iterable[str]) -> list[str]:
    """The modules among these that a job's callables may come from."""
    return [module for module in modules if all(allowed.has_module(module) for allowed in _lists)]


def resolve(name: str, what: str) -> Callable[..., Any]:
    """The object named "module:callable".

    Args:
        name: module path and dotted attribute, such as "torch.optim:AdamW".
        what: the config key, for the error message.

    Raises:
        FactoryError: it does not import, does not exist, is not callable, or not allowed here.
    """
    module_name, _, attribute = name.partition(":")
    try:
        for allowed in _lists:
            return allowed.find(module_name, attribute)
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except FactoryError as error:
        raise FactoryError(
            f"{what} = {name!r} is refused by a server that was started with --allow or --no-code: "
            f"{error}"
        ) from error
    except (Exception, SystemExit) as error:  # sys.exit() in a module must not end this process
        raise FactoryError(f"{what} = {name!r} does not import: {explain(error)}") from error
    if not callable(target):
        raise FactoryError(f"{what} = {name!r} is {type(target).__name__}, not callable")
    found: Callable[..., Any] = target
    return found


def accepting(factory: Factory, what: str, num_args: int = 0) -> Callable[..., Any]:
    """The factory's callable, once its signature has the config's keyword arguments.

    Args:
        factory: the config's.
        what: the config key, for the error message.
        num_args: how many arguments it gets by position.

    Raises:
        FactoryError: it does not import, or takes no such keyword argument.
    """
    target = resolve(factory.callable, what)
    known = _keywords(target, num_args)
    for key in factory.kwargs:
        if known is not None and key not in known:
            raise FactoryError(
                f"{what} = {factory.callable!r} got an unexpected keyword argument {key!r}"
                f"{what_there_is(key, known)}"
            )
    return target


def _keywords(target: Callable[..., Any], num_args: int) -> list[str] | None:
    """Names of the arguments behind the first `num_args`; None if it may take any.

    A decorator may take more than the function that it wraps, so its own signature counts.
    """
    try:
        parameters = inspect.signature(target, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return None
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [each.name for each in named if each not in positional[:num_args]]


def create(factory: Factory, what: str, *args: Any) -> Any:
    """What the factory's callable returns for `args` and the config's keyword arguments.

    Raises:
        FactoryError: it does not import, takes no such argument, or raised.
    """
    target = accepting(factory, what, len(args))
    try:
        return target(*args, **factory.kwargs)
    except RpcmpError:
        raise
    except Exception as error:
        raise FactoryError(f"{what} = {factory.callable!r} failed: {explain(error)}") from error


def function(factory: Factory, what: str) -> Callable[..., Any]:
    """A function of tensors, such as a loss or a metric.

    A class (torch.nn:CrossEntropyLoss) is built with the keyword arguments and its instance called;
    a function gets the keyword arguments in every call.
    """
    target = resolve(factory.callable, what)
    if isinstance(target, type):
        instance: Callable[..., Any] = create(factory, what)
        return instance
    return functools.partial(accepting(factory, what), **factory.kwargs)


def explain(error: BaseException) -> str:
    """The error in one line, then the part of its traceback that lies in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    user = [frame for frame in frames if "importlib" not in frame.filename][1:]
    lines = "".join(traceback.format_list(user)).rstrip()
    return f"{one_line(error)}\n{lines}" if lines else one_line(error)
