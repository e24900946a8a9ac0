"""What follows a fault: decided from the error and what has happened so far. Pure.

a worker, a host or a link is gone           ──> go on, unless it helps nothing any more
the user's code raised                       ──> go on once: a replay tells bad luck from a bug
the same place raised again after a replay   ──> fail
the config, a version, a factory is wrong    ──> fail

From where a generation goes on: decided from what the servers hold. Pure.

Every worker has its last snapshots in its own server's memory. Another replica of its stage has the
same, or else its neighbour holds them as well. The group goes on from the newest step that every
worker can be brought to; see `snapshot.slots` for why there is one while no more than one host is
lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.errors import (
    ConfigError,
    InterruptedJobError,
    JobError,
    LossScaleError,
    NonFiniteLossError,
    RecoveryTimeoutError,
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
        tried = RecoveryTimeoutError(
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
    if isinstance(error, ConfigError | RecoveryTimeoutError | InterruptedJobError | SavingError):
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


@dataclass(frozen=True)
class HeldSnapshots:
    """The snapshots that one worker's server holds.

    Attributes:
        own: the steps of its own stage.
        mirrored: the steps of another stage, by that stage's name.
    """

    own: Collection[int] = ()
    mirrored: Mapping[str, Collection[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class CommonSnapshot:
    """A step that every worker can go on from.

    Attributes:
        step: which one.
        holders: by worker, the one whose server has to be asked for it; itself where it is at hand.
    """

    step: int
    holders: dict[str, str]


def newest_common(
    workers: Sequence[Member], holdings: Mapping[str, HeldSnapshots], known: Collection[int]
) -> CommonSnapshot | None:
    """The newest step of which every worker's snapshot is somewhere in memory.

    Args:
        workers: all.
        holdings: what each one's server holds, by its label.
        known: the steps of which the driver knows what it was itself.
    """
    places = {worker.label: _places(worker, workers, holdings) for worker in workers}
    common = set(known).intersection(*places.values())
    if not common:
        return None
    step = max(common)
    return CommonSnapshot(step, {label: place[step] for label, place in places.items()})


def neighbours(
    machines: Sequence[str], stages: Sequence[int], has_files: bool = False
) -> list[int | None]:
    """Which worker's server holds the snapshots of each worker as well: the next one of another
    machine, or else the next one; None where there is only one, and where another replica of the
    stage is enough: any, for those that are not the first; for that, one on another machine, or on
    the only one there is.

    Every server holds those of at most one other worker. On machines in turn (a, b, a, b) the next
    one is elsewhere anyway; where neighbours share one, all are shifted by as many.

    Args:
        machines: of each worker's server.
        stages: which stage each of them serves.
        has_files: whether neighbours have files of what they hold: only the first replica's own
            bits fit to a checkpoint.
    """
    count = len(machines)
    if count < 2:
        return [None] * count

    def has_twin(index: int) -> bool:
        twins = [i for i in range(count) if i != index and stages[i] == stages[index]]
        if any(i < index for i in twins):
            return True
        is_alone = len(set(machines)) == 1
        return not has_files and any(is_alone or machines[i] != machines[index] for i in twins)

    def together(shift: int) -> int:
        return sum(machines[i] == machines[(i + shift) % count] for i in range(count))

    shift = min(range(1, count), key=together)
    return [None if has_twin(i) else (i + shift) % count for i in range(count)]


def holders(config: Config, machines: Sequence[str]) -> list[int | None]:
    """Which worker's server holds the snapshots of each worker as well, in a job; see `neighbours`.

    Args:
        machines: of each worker's server.
    """
    recovery, section = config.recovery, config.checkpoint
    if not recovery.enabled or recovery.mirror_every_steps == 0:
        return [None] * len(machines)
    has_files = section is not None and not section.shared
    return neighbours(machines, [worker.stage_index for worker in config.workers], has_files)


def _places(
    worker: Member, workers: Sequence[Member], holdings: Mapping[str, HeldSnapshots]
) -> dict[int, str]:
    """Who has a worker's snapshots, by step: its own server rather than another's."""
    others = {
        step: name
        for name, held in holdings.items()
        for step in held.mirrored.get(worker.stage, ())
        if name != worker.label
    }
    twins = {
        step: other.label
        for other in workers
        if other.stage == worker.stage
        for step in holdings[other.label].own
    }
    return others | twins | dict.fromkeys(holdings[worker.label].own, worker.label)
