"""Which command helps next when one has failed: decided here alone, from the error and the command.

    a host is not there, or not as it should be    rpcmp doctor CONFIG
    it works for somebody else                     rpcmp status CONFIG
    the run had to end, and left a checkpoint      the same command with --resume
    a key or a value is wrong                      rpcmp guide configuration, all keys

Pure. Every class of errors has its own line in DECISIONS, "there is none" among them.

What is known of a command that has failed, read from its own words and its job's folder.

A command line to be shown: texts that were given in confidence are left to a shell variable.

    --set data.kwargs.token=SECRET    becomes    --set data.kwargs.token="${TOKEN:?fill it in}"

Pasted, it fails with "fill it in" until the variable has been exported: it never runs without.
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
from rpcmp.config.redaction import redacted
from rpcmp.errors import ConfigError, RpcmpError, SecurityError

if TYPE_CHECKING:
    from rpcmp.config.schema import Config


SET = "--set"

_SECRET = re.compile(r"token(\.|$)|secret|passw|credential|api_?key|private_?key", re.IGNORECASE)
"""What keys are called whose values are not shown wherever they stand."""


def shown(words: Sequence[str]) -> str:
    """Join `words` to a line for a shell, without the confidential values of its --set."""
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
    """Whether a manifest would have the hash of a text in `value`, or its key is called so.

    Args:
        key: dotted, such as "optimizer.kwargs.lr".
        value: TOML, or else a text.
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
    """`key` and its value, which is a variable named after the last of the key that is a name."""
    names = re.findall(r"[A-Za-z_][A-Za-z0-9_]*", key)
    variable = names[-1].upper() if names else "VALUE"
    return f'{shlex.quote(f"{key}=")}"${{{variable}:?fill it in}}"'


Words = list[str] | None
"""A command, or that there is none that helps."""


@dataclass(frozen=True)
class Command:
    """The command that has failed, and what is known of its job.

    Attributes:
        name: such as "drive".
        arguments: what was typed behind the name.
        config: its config, as it was typed; empty: it takes none.
        options: those of its options that say which job, and where: --connect, --set, --certs.
        certs: the folder of its certificate; empty: it has none.
        listen: where one asks who listens where it was to listen; empty: nowhere.
        server_name: whom the certificate of that server is for; empty: the host of `listen`.
        insecure: whether it was to do without certificates.
        is_there: whether there is such a file.
        is_loaded: whether it is a config.
        has_checkpoint: whether there is one that the run which failed could go on from.
        max_grad_norm: of the config; None: it has none.
        learning_rate: what `optimizer.kwargs.lr` says for all stages; None: it is not there, or
            some have another.
        others: what commands there are.
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


def remedy(error: RpcmpError, command: Command) -> str | None:
    """The command line that helps next, to be pasted into a shell; None: none does.

    See rpcmp.cli.hints for what it does not repeat.
    """
    decide = next(DECISIONS[kind] for kind in type(error).__mro__ if kind in DECISIONS)
    words = decide(command)
    return None if words is None else shown(words)


def _about_the_job(name: str, command: Command) -> Words:
    """A command that takes the same config, unless that is the one that has failed."""
    if not command.is_there or command.name == name or name not in command.others:
        return None
    if not command.config:
        return None
    return ["rpcmp", name, command.config, *command.options]


def _doctor(command: Command) -> Words:
    return _about_the_job("doctor", command)


def _status(command: Command) -> Words:
    return _about_the_job("status", command)


def _explain(command: Command) -> Words:
    """What the config means; or how the command is used, where it is not about a config."""
    if command.config and command.is_there and not command.is_loaded:
        return _keys(command)
    return _about_the_job("explain", command) or _usage(command)


def _keys(command: Command) -> Words:
    return ["rpcmp", "guide", "configuration"]


def _usage(command: Command) -> Words:
    return ["rpcmp", command.name, "--help"]


def _resume(command: Command) -> Words:
    """The same command, from the newest checkpoint on."""
    if command.name != "drive" or not command.has_checkpoint:
        return None
    return _again(command)


def _go_on(command: Command) -> Words:
    """The same command, with what an earlier run has written."""
    return _resume(replace(command, has_checkpoint=True))


def _again(command: Command, *more: str) -> Words:
    words = ["rpcmp", command.name, *command.arguments]
    if command.has_checkpoint and "--resume" not in words:
        words = [*(word for word in words if word != "--fresh"), "--resume"]
    # A bare --connect would take what follows for its addresses.
    return [*words, *more]


def _resume_or_look(command: Command) -> Words:
    return _resume(command) or _doctor(command)


def _resume_or_wait(command: Command) -> Words:
    return _resume(command) or _status(command)


def _resume_or_explain(command: Command) -> Words:
    return _resume(command) or _explain(command)


def _tame(command: Command) -> Words:
    """Smaller steps: clipped gradients first, then a lower learning rate, or more clipping."""
    if command.name != "drive":
        return None
    if command.max_grad_norm is None:
        return _again(command, "--set", "max_grad_norm=1.0")
    if command.learning_rate is None:
        return _again(command, "--set", f"max_grad_norm={command.max_grad_norm / 10:g}")
    return _again(command, "--set", f"optimizer.kwargs.lr={command.learning_rate / 10:g}")


def _other_range(command: Command) -> Words:
    return _again(command, "--set", "autocast=bfloat16") if command.name == "drive" else None


def _afresh(command: Command) -> Words:
    """Leave the checkpoints alone, and begin beside them."""
    if command.name != "drive" or not command.is_loaded:
        return _usage(command)
    words = [word for word in command.arguments if word not in ("--resume", "--fresh")]
    return ["rpcmp", command.name, *words, "--fresh"]


def _certificate(command: Command) -> Words:
    if command.certs:
        return ["rpcmp", "certs", "show", command.certs]
    return _doctor(command) or ["rpcmp", "certs", "--help"]


def _servers(command: Command) -> Words:
    return _doctor(command) or ["rpcmp", "serve", "--help"]


def _who_listens(command: Command) -> Words:
    if not command.listen:
        return _usage(command)
    words = ["rpcmp", "health", command.listen]
    words += ["--certs", command.certs] if command.certs else []
    words += ["--server-name", command.server_name] if command.server_name else []
    return [*words, "--insecure"] if command.insecure else words


def _verify(command: Command) -> Words:
    return _about_the_job("verify", command) or _doctor(command)


DECISIONS: dict[type[RpcmpError], Callable[[Command], Words]] = {
    errors.RpcmpError: _doctor,
    errors.ConfigError: _explain,
    errors.KeyConfigError: _keys,
    errors.AddressInUseError: _who_listens,
    errors.CheckpointConflictError: _go_on,
    errors.FactoryError: _doctor,
    errors.VersionError: _doctor,
    errors.CheckpointError: _afresh,
    errors.SecurityError: _certificate,
    errors.UnavailableError: _servers,
    errors.UnreachableError: _servers,
    errors.BusyError: _status,
    errors.DrainingError: _resume_or_wait,
    errors.RelayError: _doctor,
    errors.RecoveryTimeoutError: _resume_or_look,
    errors.JobError: _resume_or_look,
    errors.StageError: _resume_or_explain,
    errors.StageConfigError: _resume_or_explain,
    errors.WorkerDiedError: _resume_or_look,
    errors.WorkerHungError: _resume_or_look,
    errors.SavingError: _resume_or_look,
    errors.NonFiniteLossError: _tame,
    errors.LossScaleError: _other_range,
    errors.MismatchError: _verify,
    errors.UnsupportedJobError: _usage,
    errors.InterruptedJobError: _resume,
}
"""What helps after an error of each class; one that is added has to be decided about as well."""


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
    from rpcmp.config import loader

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
    from rpcmp.config.types import Factory

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
    from rpcmp.config import addresses

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
    from rpcmp.net.certificates import Certificate

    if certs is None:
        return ""
    try:
        names = Certificate.load(certs).hosts
    except SecurityError:
        return ""
    return "" if host in names else next((name for name in names if "*" not in name), "")
