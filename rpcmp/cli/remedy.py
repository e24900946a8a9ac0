"""Which command helps next when one has failed: decided here alone, from the error and the command.

    a host is not there, or not as it should be    rpcmp doctor CONFIG
    it works for somebody else                     rpcmp status CONFIG
    the run had to end, and left a checkpoint      the same command with --resume
    a key or a value is wrong                      python -m rpcmp.configdoc, the table of all keys

Pure. Every class of errors has its own line in DECISIONS, "there is none" among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rpcmp import errors
from rpcmp.cli.confidential import shown
from rpcmp.errors import RpcmpError

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

    See rpcmp.cli.confidential for what it does not repeat.
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
    return ["python", "-m", "rpcmp.configdoc"]


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
    errors.ListenError: _who_listens,
    errors.OtherRunError: _go_on,
    errors.FactoryError: _doctor,
    errors.VersionError: _doctor,
    errors.CheckpointError: _afresh,
    errors.SecurityError: _certificate,
    errors.UnavailableError: _servers,
    errors.UnreachableError: _servers,
    errors.BusyError: _status,
    errors.DrainingError: _resume_or_wait,
    errors.RelayError: _doctor,
    errors.ExhaustedError: _resume_or_look,
    errors.JobError: _resume_or_look,
    errors.StageError: _resume_or_explain,
    errors.StageConfigError: _resume_or_explain,
    errors.WorkerDiedError: _resume_or_look,
    errors.WorkerHungError: _resume_or_look,
    errors.SavingError: _resume_or_look,
    errors.NonFiniteLossError: _tame,
    errors.LossScaleError: _other_range,
    errors.MismatchError: _verify,
    errors.UnfitError: _usage,
    errors.InterruptedJobError: _resume,
}
"""What helps after an error of each class; one that is added has to be decided about as well."""
