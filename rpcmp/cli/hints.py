"""Hints: the command that helps next after a command has failed.

    a host is missing, or not as it should be      rpcmp doctor CONFIG
    a server works for another job                 rpcmp status CONFIG
    the run had to end, and left a checkpoint      the same command with --resume
    a key or a value is wrong                      rpcmp guide configuration, all keys

`failed` collects what is known about the command, from its arguments and its job's folder; `remedy`
chooses by SUGGESTIONS, and is pure. Confidential values are replaced by a shell variable:

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
from rpcmp.config import addresses, loader
from rpcmp.config.stored import redacted
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
    parsed = loader.parse_value(value)
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


@dataclass(frozen=True)
class Command:
    """A command that has failed, and what is known about its job.

    Attributes:
        arguments: as typed after the name.
        config: its config, as typed; empty if it takes none.
        options: the options that choose the job and its servers: --connect, --set, --certs.
        certs: the folder of its certificate; empty if there is none.
        health: arguments of `rpcmp health` for the address that `rpcmp serve` tried to bind.
        is_there: whether the config file exists.
        is_loaded: whether the config is valid.
        has_servers: whether the job uses servers that it does not start itself.
        has_checkpoint: whether the failed run has one to continue from.
        learning_rate: `optimizer.kwargs.lr` of the config, if it holds for all stages.
    """

    name: str
    arguments: Sequence[str] = ()
    config: str = ""
    options: Sequence[str] = ()
    certs: str = ""
    health: Sequence[str] = ()
    is_there: bool = True
    is_loaded: bool = True
    has_servers: bool = False
    has_checkpoint: bool = False
    max_grad_norm: float | None = None
    learning_rate: float | None = None


Suggestion = Callable[[Command], Sequence[str] | None]
"""Returns a command; None if it does not apply."""


def remedy(error: RpcmpError, command: Command) -> str | None:
    """Return the command line that helps next, to be pasted into a shell; None if none does."""
    kind = next(kind for kind in type(error).__mro__ if kind in SUGGESTIONS)
    suggestions = (suggest(command) for suggest in SUGGESTIONS[kind])
    words = next((words for words in suggestions if words is not None), None)
    return None if words is None else shown(words)


def _job_command(name: str) -> Suggestion:
    def suggest(command: Command) -> Sequence[str] | None:
        if not command.config or not command.is_there or command.name in (name, "plan"):
            return None  # the servers of a plan are not those of the config
        return ["rpcmp", name, command.config, *command.options]

    return suggest


def _guide(topic: str) -> Suggestion:
    return lambda command: ["rpcmp", "guide", topic]


def _help_of(name: str) -> Suggestion:
    return lambda command: ["rpcmp", name, "--help"]


def _usage(command: Command) -> Sequence[str]:
    return ["rpcmp", command.name, "--help"]


_doctor, _explain, _status, _verify = map(_job_command, ("doctor", "explain", "status", "verify"))
_keys = _guide("configuration")


def _keys_if_invalid(command: Command) -> Sequence[str] | None:
    is_invalid = command.config and command.is_there and not command.is_loaded
    return _keys(command) if is_invalid else None


def _doctor_of_servers(command: Command) -> Sequence[str] | None:
    return _doctor(command) if command.has_servers else None


def _resume(command: Command) -> Sequence[str] | None:
    return _again(command) if command.name == "drive" and command.has_checkpoint else None


def _continue(command: Command) -> Sequence[str] | None:
    return _resume(replace(command, has_checkpoint=True))


def _again(command: Command, *more: str) -> Sequence[str]:
    words = ["rpcmp", command.name, *command.arguments]
    if command.has_checkpoint and "--resume" not in words:
        words = [*(word for word in words if word != "--fresh"), "--resume"]
    # `more` is not inserted: a bare --connect would take what follows for its addresses.
    return [*words, *more]


def _smaller_steps(command: Command) -> Sequence[str] | None:
    """Suggest clipped gradients first, then a lower learning rate, or more clipping."""
    if command.name != "drive":
        return None
    if command.max_grad_norm is None:
        override = "max_grad_norm=1.0"
    elif command.learning_rate is None:
        override = f"max_grad_norm={command.max_grad_norm / 10:g}"
    else:
        override = f"optimizer.kwargs.lr={command.learning_rate / 10:g}"
    return _again(command, SET, override)


def _bfloat16(command: Command) -> Sequence[str] | None:
    return _again(command, SET, "autocast=bfloat16") if command.name == "drive" else None


def _fresh(command: Command) -> Sequence[str] | None:
    if command.name != "drive" or not command.is_loaded:
        return None
    words = [word for word in command.arguments if word not in ("--resume", "--fresh")]
    return ["rpcmp", command.name, *words, "--fresh"]


def _certificate(command: Command) -> Sequence[str] | None:
    return ["rpcmp", "certs", "show", command.certs] if command.certs else None


def _health_of_listener(command: Command) -> Sequence[str] | None:
    return ["rpcmp", "health", *command.health] if command.health else None


SUGGESTIONS: dict[type[RpcmpError], tuple[Suggestion, ...]] = {
    errors.RpcmpError: (_doctor,),
    errors.ConfigError: (_keys_if_invalid, _explain, _usage),
    errors.KeyConfigError: (_keys,),
    errors.AddressInUseError: (_health_of_listener, _usage),
    errors.CheckpointConflictError: (_continue,),
    errors.FactoryError: (_doctor_of_servers, _guide("models")),
    errors.VersionError: (_doctor,),
    errors.CheckpointError: (_fresh, _usage),
    errors.SecurityError: (_certificate, _doctor, _help_of("certs")),
    errors.UnavailableError: (_doctor, _help_of("serve")),
    errors.UnreachableError: (_doctor, _help_of("serve")),
    errors.BusyError: (_status,),
    errors.TakenOverError: (_status,),
    errors.DrainingError: (_resume, _status),
    errors.RelayError: (_doctor,),
    errors.RecoveryTimeoutError: (_resume, _doctor),
    errors.JobError: (_resume, _doctor),
    errors.StageError: (_resume, _keys_if_invalid, _explain, _usage),
    errors.StageConfigError: (_resume, _keys_if_invalid, _explain, _usage),
    errors.DeviceLostError: (_resume, _doctor),
    errors.WorkerDiedError: (_resume, _doctor),
    errors.WorkerHungError: (_resume, _doctor),
    errors.SavingError: (_resume, _doctor),
    errors.NonFiniteLossError: (_smaller_steps,),
    errors.LossScaleError: (_bfloat16,),
    errors.MismatchError: (_verify, _doctor),
    errors.UnsupportedJobError: (_usage,),
    errors.InterruptedJobError: (_resume,),
}
"""What to suggest after an error of each class, the first that applies. A new class needs an entry
too."""


def failed(command: click.Command, name: str, arguments: Sequence[str], began: datetime) -> Command:
    """Collect what is known about a command that has failed; `began` is when it started."""
    with command.make_context(name, list(arguments), resilient_parsing=True) as ctx:
        params = ctx.params
    config, certs = params.get("config"), params.get("certs")
    job = None if config is None else _loaded(config, params)
    known: dict[str, Any] = {}
    if job is not None:
        certs = certs or job.certs_folder
        known = {
            "has_checkpoint": _has_checkpoint(job, None if params.get("resume") else began),
            "max_grad_norm": job.max_grad_norm,
            "learning_rate": _learning_rate(job),
        }
    return Command(
        name,
        tuple(arguments),
        config="" if config is None else str(config),
        options=_options(params),
        certs=str(certs or ""),
        health=_health_arguments(params) if name == "serve" else (),
        is_there=config is None or os.path.exists(config),  # Path.exists raises PermissionError
        is_loaded=job is not None,
        has_servers=bool(params.get("connect") or (job and job.addresses)),
        **known,
    )


def _options(params: dict[str, Any]) -> list[str]:
    words = []
    for override in params.get("overrides") or ():
        words += [SET, override]
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


def _health_arguments(params: dict[str, Any]) -> list[str]:
    """Return the arguments of `rpcmp health` for the address of `serve`; empty if it is invalid."""
    stage, replica = params.get("stage") or 0, params["replica"]
    try:
        listen = params.get("listen") or addresses.with_port(addresses.LOOPBACK, stage, replica)
        host, port = addresses.parse(listen)
    except ConfigError:
        return []
    if not port:  # port 0 picks a free one
        return []
    with contextlib.suppress(ValueError):  # all interfaces: ask at the loopback
        ip = ipaddress.ip_address(host)
        if ip.is_unspecified:
            host = "127.0.0.1" if ip.version == 4 else "::1"
    words, certs = [addresses.format_address(host, port)], params.get("certs")
    if certs is not None:
        words += ["--certs", str(certs)]
        words += [word for name in _other_name(host, certs) for word in ("--server-name", name)]
    return [*words, "--insecure"] if params.get("insecure") else words


def _other_name(host: str, certs: Path) -> list[str]:
    """Return a name of the certificate to ask for; none if `host` is one, or it has none."""
    from rpcmp.net.certificates import Certificate

    try:
        names = Certificate.load(certs).hosts
    except SecurityError:
        return []
    return [] if host in names else [name for name in names if "*" not in name][:1]
