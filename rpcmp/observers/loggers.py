"""Loggers: the user's own functions that are told of a run, such as for Weights & Biases."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from rpcmp import factory
from rpcmp.config import Config
from rpcmp.errors import FactoryError
from rpcmp.kinds import Factory
from rpcmp.process.channel import Message


class Logger:
    """One of them; an observer.

    Args:
        made: "module:callable", with arguments.
        what: its key in the config.
        config: the job, which the callable is given.

    Raises:
        FactoryError: the callable raised, or did not return a function.
    """

    def __init__(self, made: Factory, what: str, config: Config) -> None:
        self.name = f"the logger {made.callable!r}"
        found: Any = factory.create(made, what, config)
        if not callable(found):
            raise FactoryError(
                f"{what} = {made.callable!r} returned {type(found).__name__}; it has to return a "
                "function that takes an event"
            )
        self._tell: Callable[[Message], Any] = found

    def tell(self, event: Message) -> None:
        """See Observer; user code may do with an event what it likes.

        Raises:
            FactoryError: it has raised; says where.
        """
        try:
            self._tell(copy.deepcopy(event))
        except (Exception, SystemExit) as error:
            raise FactoryError(factory.explain(error)) from error

    def close(self) -> None:
        """See Observer. The event `end` was its last."""


def loggers(config: Config) -> list[Logger]:
    """Those of a config; all are looked up before the first is called.

    Raises:
        FactoryError: one cannot be had.
    """
    named = {f"log.loggers.{index}": made for index, made in enumerate(config.log.loggers)}
    if named:
        sys.path.insert(0, str(config.folder))
    for what, made in named.items():
        factory.resolve(made.callable, what)
    return [Logger(made, what, config) for what, made in named.items()]
