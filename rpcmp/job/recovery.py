"""What follows a fault: decided from the error and what has happened so far. Pure.

a worker, a host or a link is gone           ──> go on, unless it helps nothing any more
the user's code raised                       ──> go on once: a replay tells bad luck from a bug
the same place raised again after a replay   ──> fail
the config, a version, a factory is wrong    ──> fail
"""

from __future__ import annotations

from dataclasses import dataclass

from rpcmp.errors import (
    ConfigError,
    ExhaustedError,
    InterruptedJobError,
    JobError,
    LossScaleError,
    NonFiniteLossError,
    RpcmpError,
    SavingError,
    StageError,
    UnavailableError,
    WorkerDiedError,
    WorkerHungError,
)

LONGEST_PAUSE = 10.0

Place = tuple[object, ...]
"""Where the user's code raised."""


@dataclass(frozen=True)
class History:
    """What has gone wrong since the last step that was new.

    Attributes:
        restarts: how often the group was formed again without a new step.
        raised: where the user's code has raised and was replayed.
    """

    restarts: int = 0
    raised: frozenset[Place] = frozenset()


@dataclass(frozen=True)
class Decision:
    """What to do.

    Attributes:
        error: why the run ends; None: it goes on.
        pause: seconds to wait before that.
        history: from now on.
    """

    error: RpcmpError | None
    pause: float
    history: History


def decide(
    error: RpcmpError,
    history: History,
    max_restarts: int,
    has_begun: bool,
    has_stepped: bool = True,
) -> Decision:
    """What to do after `error`.

    Args:
        error: what ended the generation.
        history: so far.
        max_restarts: how often to try without a new step in between.
        has_begun: whether any group of this run has ever been formed.
        has_stepped: whether it has done a step since it was started or resumed.
    """
    if not is_recoverable(error, has_begun, has_stepped):
        return Decision(error, 0.0, history)
    found = place(error)
    if found in history.raised:
        return Decision(error, 0.0, history)
    if history.restarts >= max_restarts:
        tried = ExhaustedError(
            f"gave up after {history.restarts} restarts without a new step; the last: {error}"
        )
        return Decision(tried, 0.0, history)
    pause = min(2.0 ** min(history.restarts - 1, 10), LONGEST_PAUSE) if history.restarts else 0.0
    raised = history.raised if found is None else history.raised | {found}
    return Decision(None, pause, History(history.restarts + 1, raised))


def is_recoverable(error: RpcmpError, has_begun: bool, has_stepped: bool = True) -> bool:
    """Whether another try may go better.

    Before the first group was formed only what is plainly lost is tried again: a server that is
    not there, or a model that cannot be built, is for the user to mend; and so is what their code
    raises in the first step after the run was started or resumed.
    """
    if isinstance(error, ConfigError | ExhaustedError | InterruptedJobError | SavingError):
        return False
    if isinstance(error, WorkerDiedError | WorkerHungError):
        return True
    if isinstance(error, UnavailableError):
        return has_begun
    if isinstance(error, StageError):
        return has_stepped if has_begun else error.phase != "build"
    if isinstance(error, NonFiniteLossError):
        return has_stepped or not has_begun
    return isinstance(error, JobError)


def place(error: RpcmpError) -> Place | None:
    """Where the user's code raised; None for faults that are not its own."""
    match error:
        case StageError():
            return ("stage", error.stage, error.phase, error.step, error.microbatch)
        case NonFiniteLossError():
            return ("loss", error.step, error.microbatch)
        case LossScaleError():
            return ("loss scale", error.step)
        case WorkerDiedError() | WorkerHungError():
            return None
        case JobError():
            return ("driver", str(error).partition("\n")[0])
    return None
