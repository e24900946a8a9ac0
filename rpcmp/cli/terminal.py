"""Lines on a terminal. `echo` here and `Console` in rpcmp.cli.console are the only ways to it."""

from __future__ import annotations

import click

from rpcmp.visible import visible


def echo(text: object = "", err: bool = False, nl: bool = True) -> None:
    """Print `text`, made visible first; see click.echo.

    Args:
        text: an object is printed as its text.
        err: to standard error.
        nl: add a new line.
    """
    click.echo(visible(str(text)), err=err, nl=nl)
