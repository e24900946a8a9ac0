"""What is known of a command that has failed, read from its own words and its job's folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpcmp.cli.remedy import Command
from rpcmp.errors import ConfigError, RpcmpError

if TYPE_CHECKING:
    from rpcmp.config import Config


def failed(
    command: click.Command, name: str, arguments: Sequence[str], others: Sequence[str]
) -> Command:
    """The command that `arguments` follow.

    Args:
        command: as click has it.
        name: what it is called.
        arguments: as they were typed.
        others: all commands that there are.
    """
    with command.make_context(name, list(arguments), resilient_parsing=True) as ctx:
        params = ctx.params
    config = params.get("config")
    known: dict[str, Any] = {"is_loaded": False}
    if config is not None and (job := _loaded(config, params)) is not None:
        known = _known(job, params.get("certs"))
    elif params.get("certs"):
        known["certs"] = str(params["certs"])
    return Command(
        name,
        tuple(arguments),
        config="" if config is None else str(config),
        options=_options(params),
        is_there=config is None or os.path.exists(config),  # Path's raises where it may not look
        listen=_listens(params) if name == "serve" else "",
        others=others,
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
    from rpcmp.checkpoint.folder import CheckpointFolder

    try:
        has_checkpoint = any(True for _ in CheckpointFolder(job.checkpoint_folder).valid())
    except RpcmpError:
        has_checkpoint = False
    rate = job.optimizer.kwargs.get("lr")
    return {
        "is_loaded": True,
        "has_checkpoint": has_checkpoint,
        "checkpoints": f"rpcmp-{job.name}" if job.checkpoint is None else job.checkpoint.dir,
        "certs": str(certs or job.certs_folder or ""),
        "max_grad_norm": job.max_grad_norm,
        "learning_rate": float(rate) if isinstance(rate, int | float) else None,
    }


def _listens(params: dict[str, Any]) -> str:
    """Where a server was to listen; empty where there is no such port, which is what failed."""
    from rpcmp import addresses

    with contextlib.suppress(ConfigError):
        stage, replica = params.get("stage") or 0, params["replica"]
        return params.get("listen") or addresses.with_port(addresses.HERE, stage, replica)
    return ""
