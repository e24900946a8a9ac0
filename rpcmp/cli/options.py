"""Options that several commands share: the config, overrides, servers, certificates, the log."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rpcmp.cli import completion
from rpcmp.config import addresses
from rpcmp.errors import ConfigError
from rpcmp.process.logging.collector import Display
from rpcmp.process.logging.records import LEVELS

if TYPE_CHECKING:
    from rpcmp.config.schema import Config

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_PORTS = "default"
"""What a bare `--connect` stands for."""

ANY_PORT = ""
"""What a bare `--ui` stands for: the default port, or any other that is free."""


def set_option(overridden: str) -> Callable[[Command], Command]:
    return click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        shell_complete=completion.keys,
        help=f"Override {overridden}. Repeatable.",
    )


def config_argument(command: Command) -> Command:
    """Add CONFIG, `--set`, `--certs` and `--insecure`; the last two become overrides too."""

    @click.argument(
        "config",
        type=click.Path(path_type=Path, dir_okay=False),
        shell_complete=completion.configs,
    )
    @set_option("a key of the config, such as data.batch_size=64")
    @certs_options
    @functools.wraps(command)
    def with_security(
        *args: Any,
        certs: Path | None,
        insecure: bool,
        overrides: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        more = [f"security.certs={json.dumps(str(certs.absolute()))}"] if certs else []
        more += ["security.insecure=true"] if insecure else []
        return command(*args, overrides=(*more, *overrides), **kwargs)

    return with_security  # type: ignore[return-value]


def certs_options(command: Command) -> Command:
    command = click.option(
        "--insecure",
        is_flag=True,
        help="Talk to other machines without certificates: only for a network that no one else "
        "uses.",
    )(command)
    return click.option(
        "--certs",
        metavar="DIR",
        envvar="RPCMP_CERTS",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        help="A folder with ca.crt, tls.crt and tls.key; see `rpcmp certs`.",
    )(command)


def log_options(command: Command) -> Command:
    """Add `--log-json` and `--log-level`; the command gets the `Display` that they set."""

    @click.option(
        "--log-json", is_flag=True, help="Log one JSON object per line, on standard error."
    )
    @click.option(
        "--log-level",
        type=click.Choice(LEVELS),
        default="info",
        show_default=True,
        help="The lowest level that the log shows. Prints count as info.",
    )
    @functools.wraps(command)
    def with_log(*args: Any, log_json: bool, log_level: str, **kwargs: Any) -> Any:
        display = click.get_current_context().obj or Display()  # obj: see `rpcmp.cli.main`
        display.set(log_json, log_level)
        return command(*args, display=display, **kwargs)

    return with_log  # type: ignore[return-value]


def _checked_ui(ctx: click.Context, parameter: click.Parameter, ui: str | None) -> str | None:
    """Check the address at once: a bare `--ui` before CONFIG would take that for its address."""
    if ui:
        from rpcmp.observability.dashboard.page_server import (
            parse,  # needs more libraries than options do
        )

        parse(ui)
    return ui


connect_option = click.option(
    "--connect",
    metavar="[HOST[:PORT],...]",
    is_flag=False,
    flag_value=DEFAULT_PORTS,
    help="Use running stage servers: one address per stage, or per replica of each stage. "
    "Without addresses: localhost's default ports.",
)
metrics_option = click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Serve metrics at this address, as OpenMetrics for Prometheus; port 0 picks a free "
    "one. Addresses other than loopback need --certs, for TLS, or --insecure, for everyone.",
)
ui_option = click.option(
    "--ui",
    metavar="[[HOST:]PORT]",
    is_flag=False,
    flag_value=ANY_PORT,
    callback=_checked_ui,
    help="Serve a live page of the run and print its address; to other machines only with --certs.",
)
budget_option = click.option(
    "--budget",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="How long it may take, including the start.",
)


def addresses_of(connect: str | None, config: Config) -> list[str] | None:
    """Return the addresses of `--connect`; None for the config's, or for servers of our own."""
    if connect is None:
        return None
    workers = [(worker.stage_index, worker.replica) for worker in config.workers]
    if connect == DEFAULT_PORTS:
        return [addresses.with_port(addresses.LOOPBACK, *worker) for worker in workers]
    parts = [part.strip() for part in connect.split(",") if part.strip()]
    if not parts:
        raise ConfigError("--connect: no address given; leave it bare for the default ports")
    # Too many addresses are reported elsewhere.
    workers += [(index, 0) for index in range(len(workers), len(parts))]
    pairs = zip(parts, workers, strict=False)
    return [addresses.with_port(part, *worker) for part, worker in pairs]


def require_writable(path: Path) -> None:
    """Check that a result can be written, before the work for it starts; leaves no file behind."""
    existed = os.path.lexists(path)  # also a link to nothing, which is the user's
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    if not existed:
        path.unlink()
