"""What the user's code raised at a stage: as an error for everybody to see, and remembered."""

from __future__ import annotations

import threading
import traceback

from rpcmp.errors import RpcmpError, StageError, from_wire, one_line, to_wire
from rpcmp.transport import Raised
from rpcmp.work import Work


def failure(
    stage: str, phase: str, work: Work, error: BaseException, received: str = ""
) -> StageError:
    """The error of `stage` in its `phase` of a micro-batch, with what it had `received`."""
    return StageError(
        stage=stage,
        phase=phase,
        cause=one_line(error),
        traceback="".join(traceback.format_exception(error)),
        step=work.step,
        microbatch=work.microbatch,
        received=received,
    )


class Failures:
    """What has failed at a stage and the driver has not collected yet. Thread-safe.

    Attributes:
        broken: the failure after which this stage cannot go on, since nobody waited for what failed
            and other stages may have stepped; None while it can.
    """

    def __init__(self) -> None:
        self.broken: RpcmpError | None = None
        self._lock = threading.Lock()
        self._found: list[tuple[int, Raised]] = []

    def note(self, work: Work, error: RpcmpError) -> Raised:
        """Remember a failure; returns it as an answer for whoever asked."""
        raised = Raised(to_wire(error))
        with self._lock:
            self._found.append((work.round, raised))
        return raised

    def note_broken(self, work: Work, error: StageError) -> None:
        """Remember a failure in what nobody waits for any more."""
        self.note(work, error)
        self.broken = error

    def first(self, round_number: int) -> RpcmpError | None:
        """What failed first in a round, or before it so that nothing can go on."""
        with self._lock:
            found = [raised.error for number, raised in self._found if number == round_number]
        return from_wire(found[0]) if found else self.broken

    def take(self, first: int, last: int) -> list[Raised]:
        """What failed in the rounds from `first` to `last`; all others are forgotten, too."""
        with self._lock:
            found, self._found = self._found, []
        return [raised for number, raised in found if first <= number <= last]
