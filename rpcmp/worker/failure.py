"""What the user's code raised at a stage, as the error that everybody gets to see."""

from __future__ import annotations

import traceback

from rpcmp.errors import StageError, one_line
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
