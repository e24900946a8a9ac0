"""What is known of a command that has failed, read from its own words and its job's folder."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpcmp.cli.remedy import Command
from rpcmp.errors import ConfigError, RpcmpError, SecurityError

if TYPE_CHECKING:
    from rpcmp.config import Config


def failed(
    command: click.Command,
    name: str,
    arguments: Sequence[str],
    others: Sequence[str],
    began: datetime,
) -> Command:
    """The command that `arguments` follow.

    Args:
        command: as click has it.
        name: what it is called.
        arguments: as they were typed.
        others: all commands that there are.
        began: when it did.
    """
    with command.make_context(name, list(arguments), resilient_parsing=True) as ctx:
        params = ctx.params
    config = params.get("config")
    known: dict[str, Any] = {"is_loaded": False}
    if config is not None and (job := _loaded(config, params)) is not None:
        known = {
            **_known(job, params.get("certs")),
            "has_checkpoint": _has_checkpoint(job, None if params.get("resume") else began),
        }
    elif params.get("certs"):
        known["certs"] = str(params["certs"])
    return Command(
        name,
        tuple(arguments),
        config="" if config is None else str(config),
        options=_options(params),
        is_there=config is None or os.path.exists(config),  # Path's raises where it may not look
        others=others,
        **(_listens(params) if name == "serve" else {}),
        **known,
    )


def _options(params: dict[str, Any]) -> list[str]:
    """Those that other commands with a config take as well; a bare --connect is the last."""
    words = []
    for override in params.get("overrides") or ():
        words += ["--set", override]
    if params.get("certs"):
        words += ["--certs", str(params["certs"])]
    if params.get("insecure"):
        words.append("--insecure")
    if (connect := params.get("connect")) is not None:
        words += ["--connect"] if connect == "default" else ["--connect", connect]
    return words


def _loaded(config: Path, params: dict[str, Any]) -> Config | None:
    from rpcmp import configfile

    certs = params.get("certs")
    more = [f"security.certs={json.dumps(str(certs.absolute()))}"] if certs else []
    try:
        return configfile.load(config, [*more, *(params.get("overrides") or ())])
    except RpcmpError:
        return None


def _known(job: Config, certs: Path | None) -> dict[str, Any]:
    return {
        "is_loaded": True,
        "certs": str(certs or job.certs_folder or ""),
        "max_grad_norm": job.max_grad_norm,
        "learning_rate": _learning_rate(job),
    }


def _has_checkpoint(job: Config, since: datetime | None) -> bool:
    """Whether there is one to go on from that was written since then: an older one is not of the
    run that has failed, and what --resume would go on from is another."""
    from rpcmp.checkpoint.runs import newest_in

    try:
        run = newest_in(job.checkpoint_folder, job.name)
    except RpcmpError:
        return False
    return run is not None and run.newest is not None and not (since and run.is_before(since))


def _learning_rate(job: Config) -> float | None:
    """What `optimizer.kwargs.lr` says for all stages; None: that key is not there, or not theirs.

    Of an optimizer that is left out nothing can be set but the whole of it.
    """
    from rpcmp.kinds import Factory

    own = [stage.optimizer for stage in job.stages]
    if "optimizer" not in job.model_fields_set:
        return None
    if any(isinstance(one, Factory) or "lr" in one for one in own):
        return None
    rate = job.optimizer.kwargs.get("lr")
    return float(rate) if isinstance(rate, int | float) else None


def _listens(params: dict[str, Any]) -> dict[str, Any]:
    """Where a server was to listen, and how to ask who does; nothing where there is no such port,
    which is what failed."""
    from rpcmp import addresses

    with contextlib.suppress(ConfigError):
        stage, replica = params.get("stage") or 0, params["replica"]
        given = params.get("listen") or addresses.with_port(addresses.HERE, stage, replica)
        host, port = addresses.parse(given)
        if port:  # any other is free
            host = _here(host)
            return {
                "listen": addresses.joined(host, port),
                "server_name": _server_name(host, params.get("certs")),
                "insecure": bool(params.get("insecure")),
            }
    return {}


def _here(host: str) -> str:
    """Where this machine is asked that listens at `host`: "every address" is not one."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
    return host


def _server_name(host: str, certs: Path | None) -> str:
    """A name of the certificate; empty where `host` is one, or there is no certificate to read."""
    from rpcmp.wire.certificate import Certificate

    if certs is None:
        return ""
    try:
        names = Certificate.load(certs).hosts
    except SecurityError:
        return ""
    return "" if host in names else next((name for name in names if "*" not in name), "")
