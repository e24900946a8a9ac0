"""What the user's code raised at a stage: as an error for everybody to see, and remembered."""

from __future__ import annotations

import threading
import traceback

from rpcmp.errors import StageError, one_line, to_wire
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
        self.broken: StageError | None = None
        self._lock = threading.Lock()
        self._found: list[tuple[int, Raised]] = []

    def note(self, work: Work, error: StageError) -> Raised:
        """Remember a failure; returns it as an answer for whoever asked."""
        raised = Raised(to_wire(error))
        with self._lock:
            self._found.append((work.round, raised))
        return raised

    def note_broken(self, work: Work, error: StageError) -> None:
        """Remember a failure in what nobody waits for any more."""
        self.note(work, error)
        self.broken = error

    def has_any(self, round_number: int) -> bool:
        """Whether something failed in a round."""
        with self._lock:
            return any(number == round_number for number, _ in self._found)

    def take(self, first: int, last: int) -> list[Raised]:
        """What failed in the rounds from `first` to `last`; all others are forgotten, too."""
        with self._lock:
            found, self._found = self._found, []
        return [raised for number, raised in found if first <= number <= last]
