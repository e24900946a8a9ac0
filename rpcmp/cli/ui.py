"""`--ui`: the live page of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rpcmp.config.schema import Config
    from rpcmp.observability.observers import Observer, Report

Command = TypeVar("Command", bound=Callable[..., Any])

ANY = ""
"""What a bare `--ui` stands for: the default port, or any other that is free."""


def ui_option(command: Command) -> Command:
    """`--ui`, with or without an address."""
    return click.option(
        "--ui",
        metavar="[[HOST:]PORT]",
        is_flag=False,
        flag_value=ANY,
        callback=_checked,
        help="Serve a live page of the run and print its address; to other machines only with "
        "--certs.",
    )(command)


def _checked(ctx: click.Context, parameter: click.Parameter, ui: str | None) -> str | None:
    """At once: a bare `--ui` before CONFIG would take that for its address."""
    if ui:
        from rpcmp.observability.dashboard.app import parse

        parse(ui)
    return ui


@contextlib.contextmanager
def page_of(job: Config, ui: str | None, observers: list[Observer], show: Report) -> Iterator[None]:
    """Serve the run's page, if it has one: show where, and have it among the observers.

    Raises:
        ConfigError: it cannot be served there.
    """
    if ui is None:
        yield
        return
    from rpcmp.observability.dashboard.app import (
        Endpoint,  # its libraries are needed by who has a page alone
    )
    from rpcmp.observability.dashboard.server import Page
    from rpcmp.observability.events.definitions import UiEvent

    place = Endpoint.open(None if ui == ANY else ui, job.certs_folder)
    page = Page(place)
    observers.append(page)
    # To nobody else: there may be a token in it.
    show(UiEvent(url=place.url).stamped(time.time(), 1))
    try:
        yield
    finally:
        page.close()
