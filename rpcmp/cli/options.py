"""Options that several commands share: the config, overrides, servers, certificates, the log."""

from __future__ import annotations

import functools
import json
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


def config_argument(command: Command) -> Command:
    """Add CONFIG, `--set`, `--certs` and `--insecure`; the last two become overrides too."""

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

    return _config_options(certs_options(with_security))  # type: ignore[return-value]


def _config_options(command: Command) -> Command:
    command = set_option("a key of the config, such as data.batch_size=64")(command)
    return click.argument(
        "config",
        type=click.Path(path_type=Path, dir_okay=False),
        shell_complete=completion.configs,
    )(command)


def set_option(what: str) -> Callable[[Command], Command]:
    """Return a decorator that adds `--set`, which overrides `what`."""
    return click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        shell_complete=completion.keys,
        help=f"Override {what}. Repeatable.",
    )


def connect_option(command: Command) -> Command:
    """Add `--connect`, with or without addresses."""
    return click.option(
        "--connect",
        metavar="[HOST[:PORT],...]",
        is_flag=False,
        flag_value=DEFAULT_PORTS,
        help="Use running stage servers: one address per stage, or per replica of each stage. "
        "Without addresses: localhost's default ports.",
    )(command)


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


def metrics_option(command: Command) -> Command:
    return click.option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve metrics at this address, as OpenMetrics for Prometheus; port 0 picks a free "
        "one. Addresses other than loopback need --certs, for TLS, or --insecure, for everyone.",
    )(command)


def addresses_of(connect: str | None, config: Config) -> list[str] | None:
    """Return the addresses of `--connect`; None for the config's, or for servers of our own."""
    if connect is None:
        return None
    if connect == DEFAULT_PORTS:
        return [
            f"127.0.0.1:{addresses.default_port(worker.stage_index, worker.replica)}"
            for worker in config.workers
        ]
    parts = [part.strip() for part in connect.split(",") if part.strip()]
    places = [(worker.stage_index, worker.replica) for worker in config.workers]
    # Too many addresses are reported elsewhere.
    places += [(index, 0) for index in range(len(places), len(parts))]
    given = [addresses.with_port(part, *place) for part, place in zip(parts, places, strict=False)]
    if not given:
        raise ConfigError("--connect: no address given; leave it bare for the default ports")
    return given


def log_options(command: Command) -> Command:
    """Add `--log-json` and `--log-level`; the command gets the `Display` that they set."""

    @functools.wraps(command)
    def with_log(*args: Any, log_json: bool, log_level: str, **kwargs: Any) -> Any:
        display = click.get_current_context().obj or Display()  # obj: see `rpcmp.cli.main`
        display.set(log_json, log_level)
        return command(*args, display=display, **kwargs)

    logged = click.option(
        "--log-level",
        type=click.Choice(LEVELS),
        default="info",
        show_default=True,
        help="The lowest level that the log shows. Prints count as info.",
    )(with_log)
    return click.option(  # type: ignore[return-value]
        "--log-json", is_flag=True, help="Log one JSON object per line, on standard error."
    )(logged)


def require_writable(path: Path) -> None:
    """Check that a result can be written, before the work for it starts; leaves no file behind."""
    existed = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    if not existed:
        path.unlink()


ANY_PORT = ""
"""What a bare `--ui` stands for: the default port, or any other that is free."""


def ui_option(command: Command) -> Command:
    """Add `--ui`, with or without an address."""
    return click.option(
        "--ui",
        metavar="[[HOST:]PORT]",
        is_flag=False,
        flag_value=ANY_PORT,
        callback=_checked_ui,
        help="Serve a live page of the run and print its address; to other machines only with "
        "--certs.",
    )(command)


def _checked_ui(ctx: click.Context, parameter: click.Parameter, ui: str | None) -> str | None:
    """Check the address at once: a bare `--ui` before CONFIG would take that for its address."""
    if ui:
        from rpcmp.observability.dashboard.page_server import (
            parse,  # needs more libraries than options do
        )

        parse(ui)
    return ui


budget_option = click.option(
    "--budget",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="How long it may take, including the start.",
)
