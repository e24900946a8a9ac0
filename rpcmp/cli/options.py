"""What several commands have in common: the config, overrides, and where the servers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from rpcmp import addresses
from rpcmp.config import Config
from rpcmp.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_PORTS = "default"


def config_argument(command: Command) -> Command:
    """The config file, and `--set`."""
    command = click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        help="Override a key of the config, such as data.batch_size=64. Repeatable.",
    )(command)
    return click.argument("config", type=click.Path(path_type=Path, dir_okay=False))(command)


def connect_option(command: Command) -> Command:
    """`--connect`, with or without addresses."""
    return click.option(
        "--connect",
        metavar="[HOST:PORT,...]",
        is_flag=False,
        flag_value=DEFAULT_PORTS,
        help="Use running stage servers, one address a stage; bare: localhost's default ports.",
    )(command)


def addresses_of(connect: str | None, config: Config) -> list[str] | None:
    """The servers to use: `--connect`'s, or None for the config's or own ones."""
    if connect is None:
        return None
    if connect == DEFAULT_PORTS:
        return [f"127.0.0.1:{addresses.default_port(i)}" for i in range(config.num_stages)]
    given = [part.strip() for part in connect.split(",") if part.strip()]
    if not given:
        raise ConfigError("--connect: no address given; leave it bare for the default ports")
    return given


def require_writable(path: Path) -> None:
    """Fail before the work whose result is to go there; leaves no file behind.

    Raises:
        ConfigError: `path` cannot be written.
    """
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    if not existed:
        path.unlink()
