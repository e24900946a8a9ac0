"""Everything rpcmp raises on purpose, in one tree.

    RpcmpError
    ├── ConfigError                exit 2   the config, the command line or the user's factories
    │   ├── KeyConfigError              a key or a value of the config is wrong
    │   ├── AddressInUseError           an address is taken, or not this machine's
    │   ├── CheckpointConflictError     there are checkpoints of another run
    │   ├── FactoryError                a "module:callable" does not import, or raised
    │   ├── VersionError                hosts that run different software
    │   ├── CheckpointError             a checkpoint is damaged, or of another model
    │   └── SecurityError               a certificate, a key or a role that does not do
    ├── UnavailableError           exit 75  try again later, nothing is wrong with the job
    │   ├── UnreachableError            no answer from a stage server
    │   ├── BusyError                   the server trains another job
    │   ├── DrainingError               the server is being stopped
    │   ├── RelayError                  a connection between two hosts broke
    │   └── RecoveryTimeoutError        recovery has been tried often enough
    ├── JobError                   exit 1   the job failed
    │   ├── StageError                  the user's code raised at a stage
    │   │   ├── StageConfigError   exit 2   a stage refuses what the config gives it
    │   │   └── DeviceLostError             its device has failed, and its worker with it
    │   ├── WorkerDiedError             a worker or driver process is gone
    │   ├── WorkerHungError             one is stopped, stuck or cut off
    │   ├── NonFiniteLossError          the loss became NaN or infinite
    │   ├── SavingError                 checkpoints that the config wants cannot be written
    │   ├── LossScaleError              no gradient of a scaled loss is ever finite
    │   ├── MismatchError               `verify`, `bench` or a run's replicas differ
    │   └── UnsupportedJobError         a peer of `rpcmp bench` cannot run the case
    ├── TakenOverError             exit 76  another driver has the job: do not start this one again
    └── InterruptedJobError        exit 128+n  a signal ended the job

Errors cross process borders as JSON (`to_wire`, `from_wire`): nothing that a peer sends is
unpickled or looked up outside this module.
"""

from __future__ import annotations

import errno
import inspect
import itertools
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, Self


class RpcmpError(Exception):
    """Base of all errors of this package.

    `exit_code` is the exit code of the command line. `fields` are the constructor's arguments,
    which are sent with the error to other processes. `stage` is the label of the worker that
    raised it, or "driver"; empty if unknown.
    """

    exit_code: ClassVar[int] = 1
    stage: str = ""

    fields: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        error = super().__new__(cls, *args)
        given = inspect.signature(cls.__init__).bind(error, *args, **kwargs)
        given.apply_defaults()
        error.fields = {name: value for name, value in given.arguments.items() if name != "self"}
        return error

    def __init__(self, message: str) -> None:
        super().__init__(message)


class ConfigError(RpcmpError):
    """The configuration, the command line or a factory that it names cannot be used."""

    exit_code = 2


class KeyConfigError(ConfigError):
    """A config has an unknown key, or a key has a value that it cannot have."""


class AddressInUseError(ConfigError):
    """A stage server cannot listen on its address."""


class CheckpointConflictError(ConfigError):
    """A run's checkpoints would be mixed with another run's."""


class FactoryError(ConfigError):
    """A "module:callable" of the config does not import, or raised when it was called."""


class VersionError(ConfigError):
    """A host runs another rpcmp, torch, Python or protocol than the driver."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged, incomplete, or of another model."""


class SecurityError(ConfigError):
    """A certificate or key cannot be used, or a host is not who it should be."""


class UnavailableError(RpcmpError):
    """A stage server cannot take the job now."""

    exit_code = 75


class UnreachableError(UnavailableError):
    """A stage server does not answer."""


class BusyError(UnavailableError):
    """A stage server belongs to another job, which goes on undisturbed."""


class TakenOverError(RpcmpError):
    """Another driver has taken the job over; this one must not go on with it, nor be restarted."""

    exit_code = 76


class DrainingError(UnavailableError):
    """A stage server is stopping; the job ended after its current step."""


class RelayError(UnavailableError):
    """A connection that carries tensors from host to host broke, or does not speak as it should."""


class RecoveryTimeoutError(UnavailableError):
    """Something was lost again and again, or did not come back; the run has left a checkpoint."""


class JobError(RpcmpError):
    """The job failed; the stage servers are free again."""


class WorkerDiedError(JobError):
    """A worker or driver process ended unexpectedly."""


class MismatchError(JobError):
    """Bits differ that should not: in `rpcmp verify`, in `bench`'s losses, or between replicas.

    The last are compared whenever the parameters are hashed, so at the end of every run too.
    """


class UnsupportedJobError(JobError):
    """A peer of `rpcmp bench` cannot run the case; the others are compared without it."""


class StageError(JobError):
    """The user's code raised at a stage.

    Args:
        stage: name of the stage.
        phase: "build", "data" (samples that the stage loads itself), "forward" (loss and metrics
            included), "backward", "sum" (of the gradients of replicas and shared parameters),
            "optimizer" (and scheduler) or "saving" (what the stage is after a step).
        cause: one line, "ValueError: ...".
        traceback: the remote traceback, formatted.
        step: optimizer step, counted from 1; None before the first.
        microbatch: index within the step; None if it does not apply.
        received: what the stage had received, "from 'a': float32[8, 10]"; empty where unknown.
    """

    def __init__(
        self,
        stage: str,
        phase: str,
        cause: str,
        traceback: str = "",
        step: int | None = None,
        microbatch: int | None = None,
        received: str = "",
    ) -> None:
        where = "" if microbatch is None else f" of micro-batch {microbatch}"
        when = "" if step is None else f" at step {step}"
        what = f"; it had received {received}" if received else ""
        message = f"stage {stage!r} failed in {phase}{where}{when}: {cause}{what}"
        super().__init__(message)
        self.stage, self.phase, self.step, self.microbatch = stage, phase, step, microbatch
        self.traceback = traceback


class StageConfigError(StageError):
    """A stage refuses what the config gives it: as it is built, or in the first step.

    A StageError, so that a stage that fails while it is built again after a fault gets another try.
    """

    exit_code = 2


class DeviceLostError(StageError):
    """A stage's device has failed: no later call on it succeeds in that process.

    A StageError by where it shows, and a lost worker by what is done about it.
    """


class WorkerHungError(JobError):
    """A worker or driver process is stopped, stuck or cut off; it has been ended.

    Args:
        stage: name of the stage; "driver" for the driver process.
        host, pid: where it was; empty and 0 if unknown.
        phase: what it was doing; empty: it waited for others.
        step: optimizer step; 0 before the first.
        microbatch: index within the step; negative if it does not apply.
        seconds: since it was last heard of, or since anything moved.
        stacks: its state in the kernel, and where in the code its threads were.
    """

    def __init__(
        self,
        stage: str,
        host: str,
        pid: int,
        phase: str,
        step: int,
        microbatch: int,
        seconds: float,
        stacks: str,
    ) -> None:
        of = "" if microbatch < 0 else f" of micro-batch {microbatch}"
        doing = f"in {phase}{of}" if phase else "waiting for others"
        who = "the driver process" if stage == "driver" else f"the worker of stage {stage!r}"
        place = f" on {host}" if host else ""
        process = f" (pid {pid})" if pid else ""
        super().__init__(
            f"{who}{place}{process} hangs: no sign of progress for {seconds:.0f} s, {doing} at "
            f"step {step}\n{stacks}".rstrip()
        )
        self.stage, self.phase, self.step, self.microbatch = stage, phase, step, microbatch


class SavingError(JobError):
    """Checkpoints that the config wants cannot be written, so that the run would be lost."""


class NonFiniteLossError(JobError):
    """The loss became NaN or infinite; the optimizer has not stepped on it."""

    def __init__(self, loss: float, step: int, microbatch: int) -> None:
        hint = "try a lower learning rate, or `max_grad_norm`"
        if step == 1:
            hint = "no step was done before, so look at the data, the loss and the initial weights"
        if math.isnan(loss):
            hint += "; where a micro-batch may have no target that counts, set `loss_weight`"
        super().__init__(
            f"the loss is {loss} in micro-batch {microbatch} at step {step}; the parameters are "
            f"those of the step before ({hint})"
        )
        self.loss, self.step, self.microbatch = loss, step, microbatch


class LossScaleError(JobError):
    """Steps were skipped until the loss scale was of no use; the optimizer stepped on none."""

    def __init__(self, scale: float, step: int) -> None:
        super().__init__(
            f"gradients were not finite in so many steps in a row that the loss scale fell to "
            f"{scale:.1e} at step {step}; the parameters are those before the first of them (try "
            'a lower learning rate, `max_grad_norm`, or autocast = "bfloat16")'
        )
        self.scale, self.step = scale, step


class InterruptedJobError(RpcmpError):
    """A signal ended the job; the exit code is 128 + its number."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name} after step {step}")
        self.signum, self.step = signum, step


def exit_code(error: RpcmpError) -> int:
    """Return the process exit code for `error`."""
    if isinstance(error, InterruptedJobError):
        return 128 + error.signum
    return error.exit_code


UNREAD = 500
"""Characters that are shown of an error that cannot be parsed."""


def to_wire(error: RpcmpError) -> str:
    """Return `error` as JSON, to be read by `from_wire` in another process."""
    return json.dumps({"type": type(error).__name__, "fields": error.fields})


def from_wire(text: str) -> RpcmpError:
    """Return the error that `to_wire` wrote.

    An unknown type (from a newer peer) or a text that cannot be parsed (from a broken one) becomes
    a JobError that shows the text, so nothing is lost.
    """
    try:
        data = json.loads(text)
        kind = _by_name().get(data["type"])
        if kind is None:
            return JobError(f"{data['type']}: {data['fields']}")
        return kind(**data["fields"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return JobError(f"an error that cannot be read: {text[:UNREAD]!r}")


denied_hint = ""
"""What to do if a file cannot be opened; set where a process is confined."""


def one_line(error: BaseException) -> str:
    """Return the last line of a traceback, "ValueError: message", with `denied_hint` if it fits."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    is_denied = isinstance(error, PermissionError) or os.strerror(errno.EACCES) in text
    return f"{line} ({denied_hint})" if denied_hint and is_denied else line


def with_notes(error: BaseException) -> str:
    """Return the message, and a line for each note that was added to it."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


MAX_LISTED = 5
"""The most existing names that an error lists."""


def some_of(names: Sequence[str]) -> str:
    """Return the first MAX_LISTED names, and how many more there are."""
    shown = ", ".join(names[:MAX_LISTED])
    return f"{shown} and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else shown


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the most similar name in `known`, if any is similar; see difflib.get_close_matches.

    A name that differs in case only comes first.
    """
    names = list(known)
    same = (each for each in names if each.lower() == name.lower())
    return next(itertools.chain(same, get_close_matches(name, names, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str | None) -> str:
    """Return the end of an error that suggests `name`; empty for None."""
    return "" if name is None else f"; did you mean {name!r}?"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest, and some existing names."""
    names = list(known)
    if not names:
        return ""
    listed = ", ".join(map(repr, names[:MAX_LISTED])) + (", ..." if len(names) > MAX_LISTED else "")
    return f"{did_you_mean(nearest(name, names))} (there are {listed})"


def _by_name() -> dict[str, type[RpcmpError]]:
    members = inspect.getmembers(sys.modules[__name__], inspect.isclass)
    return {name: kind for name, kind in members if issubclass(kind, RpcmpError)}


_RENAMED = {
    "ExhaustedError": "RecoveryTimeoutError",
    "ListenError": "AddressInUseError",
    "OtherRunError": "CheckpointConflictError",
    "UnfitError": "UnsupportedJobError",
}
"""The names that 0.1 gave some errors; they go in the release after the next one."""


def __getattr__(name: str) -> type[RpcmpError]:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(f"rpcmp.errors.{name} is called {new} now", DeprecationWarning, stacklevel=2)
    renamed: type[RpcmpError] = globals()[new]
    return renamed
