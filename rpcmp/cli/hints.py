"""Hints: the command that helps next after a command has failed.

    a host is missing, or not as it should be      rpcmp doctor CONFIG
    a server works for another job                 rpcmp status CONFIG
    the run had to end, and left a checkpoint      the same command with --resume
    a key or a value is wrong                      rpcmp guide configuration, all keys

`failed` collects what is known about the command, from its own words and its job's folder; `remedy`
decides, and is pure. DECISIONS has an entry for every class of errors.

Confidential values are replaced by a shell variable:

    --set data.kwargs.token=SECRET    becomes    --set data.kwargs.token="${TOKEN:?fill it in}"

Pasted, it fails with "fill it in" until the variable is set.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpcmp import errors
from rpcmp.config import loader
from rpcmp.config.files import redacted
from rpcmp.errors import ConfigError, RpcmpError, SecurityError

if TYPE_CHECKING:
    from rpcmp.config.schema import Config


SET = "--set"

_SECRET = re.compile(r"token(\.|$)|secret|passw|credential|api_?key|private_?key", re.IGNORECASE)
"""Names of keys whose values are never shown."""


def shown(words: Sequence[str]) -> str:
    """Join `words` to a line for a shell, without confidential values of --set."""
    line: list[str] = []
    before = ""
    for word in words:
        inline = word.startswith(f"{SET}=")
        override = word.removeprefix(f"{SET}=") if inline or before == SET else ""
        key, separator, value = override.partition("=")
        if separator and is_confidential(key.strip(), value):
            line.append(f"{shlex.quote(SET + '=') if inline else ''}{_left_out(key.strip())}")
        else:
            line.append(shlex.quote(word))
        before = word
    return " ".join(line)


def is_confidential(key: str, value: str) -> bool:
    """Return whether manifests hash a text in `value`, or a key of it names a secret.

    `key` is dotted, such as "optimizer.kwargs.lr"; `value` is TOML, or else plain text.
    """
    if _SECRET.search(key):
        return True
    parsed = loader.value(value)
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    return bool(redacted(parsed) != parsed or _names_a_secret(parsed))


def _names_a_secret(value: object) -> bool:
    if isinstance(value, dict):
        return any(_SECRET.search(key) or _names_a_secret(item) for key, item in value.items())
    return isinstance(value, list) and any(map(_names_a_secret, value))


def _left_out(key: str) -> str:
    """Return `key`, with a variable named after its last part for the value."""
    names = re.findall(r"[A-Za-z_][A-Za-z0-9_]*", key)
    variable = names[-1].upper() if names else "VALUE"
    return f'{shlex.quote(f"{key}=")}"${{{variable}:?fill it in}}"'


Words = list[str] | None
"""A command; None if none helps."""


@dataclass(frozen=True)
class Command:
    """A command that has failed, and what is known about its job.

    Attributes:
        arguments: as typed after the name.
        config: its config, as typed; empty if it takes none.
        options: the options that choose the job and its servers: --connect, --set, --certs.
        certs: the folder of its certificate; empty if there is none.
        listen: the address that it tried to listen on, for `rpcmp health`; empty if there is none.
        server_name: a name in the certificate of that server; empty for the host of `listen`.
        is_there: whether the config file exists.
        is_loaded: whether the config is valid.
        has_checkpoint: whether the failed run has one to continue from.
        learning_rate: `optimizer.kwargs.lr` of the config, if it holds for all stages.
        others: the names of all commands.
    """

    name: str
    arguments: Sequence[str] = ()
    config: str = ""
    options: Sequence[str] = ()
    certs: str = ""
    listen: str = ""
    server_name: str = ""
    insecure: bool = False
    is_there: bool = True
    is_loaded: bool = True
    has_checkpoint: bool = False
    max_grad_norm: float | None = None
    learning_rate: float | None = None
    others: Sequence[str] = ()


Decision = Callable[[Command], Words]


def remedy(error: RpcmpError, command: Command) -> str | None:
    """Return the command line that helps next, to be pasted into a shell; None if none does."""
    decide = next(DECISIONS[kind] for kind in type(error).__mro__ if kind in DECISIONS)
    words = decide(command)
    return None if words is None else shown(words)


def _job_command(name: str) -> Decision:
    def decide(command: Command) -> Words:
        if not command.is_there or command.name == name or name not in command.others:
            return None
        return ["rpcmp", name, command.config, *command.options] if command.config else None

    return decide


def _first(*decisions: Decision) -> Decision:
    def decide(command: Command) -> Words:
        results = (decision(command) for decision in decisions)
        return next((words for words in results if words is not None), None)

    return decide


def _keys_if_invalid(command: Command) -> Words:
    if command.config and command.is_there and not command.is_loaded:
        return _keys(command)
    return None


def _keys(command: Command) -> Words:
    return ["rpcmp", "guide", "configuration"]


def _usage(command: Command) -> Words:
    return ["rpcmp", command.name, "--help"]


def _help_of(name: str) -> Decision:
    return lambda command: ["rpcmp", name, "--help"]


def _resume(command: Command) -> Words:
    if command.name != "drive" or not command.has_checkpoint:
        return None
    return _again(command)


def _continue(command: Command) -> Words:
    return _resume(replace(command, has_checkpoint=True))


def _again(command: Command, *more: str) -> Words:
    words = ["rpcmp", command.name, *command.arguments]
    if command.has_checkpoint and "--resume" not in words:
        words = [*(word for word in words if word != "--fresh"), "--resume"]
    # `more` is not inserted: a bare --connect would take what follows for its addresses.
    return [*words, *more]


def _smaller_steps(command: Command) -> Words:
    """Suggest clipped gradients first, then a lower learning rate, or more clipping."""
    if command.name != "drive":
        return None
    if command.max_grad_norm is None:
        return _again(command, "--set", "max_grad_norm=1.0")
    if command.learning_rate is None:
        return _again(command, "--set", f"max_grad_norm={command.max_grad_norm / 10:g}")
    return _again(command, "--set", f"optimizer.kwargs.lr={command.learning_rate / 10:g}")


def _bfloat16(command: Command) -> Words:
    return _again(command, "--set", "autocast=bfloat16") if command.name == "drive" else None


def _fresh(command: Command) -> Words:
    if command.name != "drive" or not command.is_loaded:
        return _usage(command)
    words = [word for word in command.arguments if word not in ("--resume", "--fresh")]
    return ["rpcmp", command.name, *words, "--fresh"]


def _certificate(command: Command) -> Words:
    return ["rpcmp", "certs", "show", command.certs] if command.certs else None


def _health_of_listener(command: Command) -> Words:
    if not command.listen:
        return _usage(command)
    words = ["rpcmp", "health", command.listen]
    words += ["--certs", command.certs] if command.certs else []
    words += ["--server-name", command.server_name] if command.server_name else []
    return [*words, "--insecure"] if command.insecure else words


_doctor, _status, _verify = map(_job_command, ("doctor", "status", "verify"))
_explain = _first(_keys_if_invalid, _job_command("explain"), _usage)
_servers = _first(_doctor, _help_of("serve"))


DECISIONS: dict[type[RpcmpError], Decision] = {
    errors.RpcmpError: _doctor,
    errors.ConfigError: _explain,
    errors.KeyConfigError: _keys,
    errors.AddressInUseError: _health_of_listener,
    errors.CheckpointConflictError: _continue,
    errors.FactoryError: _doctor,
    errors.VersionError: _doctor,
    errors.CheckpointError: _fresh,
    errors.SecurityError: _first(_certificate, _doctor, _help_of("certs")),
    errors.UnavailableError: _servers,
    errors.UnreachableError: _servers,
    errors.BusyError: _status,
    errors.DrainingError: _first(_resume, _status),
    errors.RelayError: _doctor,
    errors.RecoveryTimeoutError: _first(_resume, _doctor),
    errors.JobError: _first(_resume, _doctor),
    errors.StageError: _first(_resume, _explain),
    errors.StageConfigError: _first(_resume, _explain),
    errors.WorkerDiedError: _first(_resume, _doctor),
    errors.WorkerHungError: _first(_resume, _doctor),
    errors.SavingError: _first(_resume, _doctor),
    errors.NonFiniteLossError: _smaller_steps,
    errors.LossScaleError: _bfloat16,
    errors.MismatchError: _first(_verify, _doctor),
    errors.UnsupportedJobError: _usage,
    errors.InterruptedJobError: _resume,
}
"""What to suggest after an error of each class; a new class needs an entry too."""


def failed(
    command: click.Command,
    name: str,
    arguments: Sequence[str],
    others: Sequence[str],
    began: datetime,
) -> Command:
    """Collect what is known about a command that has failed; `began` is when it started."""
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
        is_there=config is None or os.path.exists(config),  # Path.exists raises PermissionError
        others=others,
        **(_listens(params) if name == "serve" else {}),
        **known,
    )


def _options(params: dict[str, Any]) -> list[str]:
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
    certs = params.get("certs")
    more = [f"security.certs={json.dumps(str(certs.absolute()))}"] if certs else []
    try:
        return loader.load_config(config, [*more, *(params.get("overrides") or ())])
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
    """Return whether there is a checkpoint to resume from that was written after `since`.

    An older one belongs to another run than the one that has failed.
    """
    from rpcmp.checkpoint.folder import newest_in

    try:
        run = newest_in(job.checkpoint_folder, job.name)
    except RpcmpError:
        return False
    return run is not None and run.newest is not None and not (since and run.is_before(since))


def _learning_rate(job: Config) -> float | None:
    """Return `optimizer.kwargs.lr` if it is set and holds for all stages.

    If the config has no optimizer, a single key of it cannot be overridden.
    """
    from rpcmp.config.types import Factory

    own = [stage.optimizer for stage in job.stages]
    if "optimizer" not in job.model_fields_set:
        return None
    if any(isinstance(one, Factory) or "lr" in one for one in own):
        return None
    rate = job.optimizer.kwargs.get("lr")
    return float(rate) if isinstance(rate, int | float) else None


def _listens(params: dict[str, Any]) -> dict[str, Any]:
    """Return the address that `serve` tried to bind and the options to probe it; {} if invalid."""
    from rpcmp.config import addresses

    with contextlib.suppress(ConfigError):
        stage, replica = params.get("stage") or 0, params["replica"]
        listen = params.get("listen") or addresses.with_port(addresses.HERE, stage, replica)
        host, port = addresses.parse(listen)
        if port:  # port 0 picks a free one
            host = _here(host)
            return {
                "listen": addresses.joined(host, port),
                "server_name": _server_name(host, params.get("certs")),
                "insecure": bool(params.get("insecure")),
            }
    return {}


def _here(host: str) -> str:
    """Return a host to connect to; for an address that means "all interfaces", loopback."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            return "127.0.0.1" if address.version == 4 else "::1"
    return host


def _server_name(host: str, certs: Path | None) -> str:
    """Return a name of the certificate; empty if `host` is one, or there is no certificate."""
    from rpcmp.net.certificates import Certificate

    if certs is None:
        return ""
    try:
        names = Certificate.load(certs).hosts
    except SecurityError:
        return ""
    return "" if host in names else next((name for name in names if "*" not in name), "")
