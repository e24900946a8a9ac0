"""What several commands have in common: the config, overrides, and where the servers are."""

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
from rpcmp.process.logging.display import Display
from rpcmp.process.logging.records import LEVELS

if TYPE_CHECKING:
    from rpcmp.config.schema import Config

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_PORTS = "default"


def config_argument(command: Command) -> Command:
    """The config file, `--set`, `--certs` and `--insecure`, which are overrides as well."""

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
    command = click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        shell_complete=completion.keys,
        help="Override a key of the config, such as data.batch_size=64. Repeatable.",
    )(command)
    return click.argument(
        "config",
        type=click.Path(path_type=Path, dir_okay=False),
        shell_complete=completion.configs,
    )(command)


def connect_option(command: Command) -> Command:
    """`--connect`, with or without addresses."""
    return click.option(
        "--connect",
        metavar="[HOST[:PORT],...]",
        is_flag=False,
        flag_value=DEFAULT_PORTS,
        help="Use running stage servers, one address for each stage, or for each replica of it; "
        "bare: localhost's default ports.",
    )(command)


def certs_options(command: Command) -> Command:
    """`--certs` and `--insecure`."""
    command = click.option(
        "--insecure",
        is_flag=True,
        help="Talk to other machines without certificates: only where nobody else is on the "
        "network.",
    )(command)
    return click.option(
        "--certs",
        metavar="DIR",
        envvar="RPCMP_CERTS",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        help="Folder with ca.crt, tls.crt and tls.key; see `rpcmp certs`.",
    )(command)


def metrics_option(command: Command) -> Command:
    """`--metrics`."""
    return click.option(
        "--metrics",
        metavar="HOST:PORT",
        help="Serve figures there, as OpenMetrics for Prometheus; port 0 takes a free one. "
        "Elsewhere than on loopback by TLS, with --certs; with --insecure open to all.",
    )(command)


def addresses_of(connect: str | None, config: Config) -> list[str] | None:
    """The servers to use: `--connect`'s, or None for the config's or own ones."""
    if connect is None:
        return None
    if connect == DEFAULT_PORTS:
        return [
            f"127.0.0.1:{addresses.default_port(worker.stage_index, worker.replica)}"
            for worker in config.workers
        ]
    parts = [part.strip() for part in connect.split(",") if part.strip()]
    places = [(worker.stage_index, worker.replica) for worker in config.workers]
    places += [(index, 0) for index in range(len(places), len(parts))]  # too many, said elsewhere
    given = [addresses.with_port(part, *place) for part, place in zip(parts, places, strict=False)]
    if not given:
        raise ConfigError("--connect: no address given; leave it bare for the default ports")
    return given


def log_options(command: Command) -> Command:
    """`--log-json` and `--log-level`: how this process's log looks; the command gets it."""

    @functools.wraps(command)
    def with_log(*args: Any, log_json: bool, log_level: str, **kwargs: Any) -> Any:
        display = click.get_current_context().obj or Display()  # that of `main`
        display.set(log_json, log_level)
        return command(*args, display=display, **kwargs)

    logged = click.option(
        "--log-level",
        type=click.Choice(LEVELS),
        default="info",
        show_default=True,
        help="The least that the log shows. What is printed counts as info.",
    )(with_log)
    return click.option(  # type: ignore[return-value]
        "--log-json", is_flag=True, help="A log of one JSON object a line, on standard error."
    )(logged)


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


budget_option = click.option(
    "--budget",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="How long it may take, the start included.",
)
