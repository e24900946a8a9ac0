"""The error of a stage whose code has raised: where, why, and what would help."""

from __future__ import annotations

import traceback

from rpcmp.errors import ConfigError, DeviceLostError, StageConfigError, StageError, one_line
from rpcmp.pipelining import devices


def stage_failure(
    stage: str,
    phase: str,
    error: BaseException,
    step: int | None = None,
    microbatch: int | None = None,
    received: str = "",
    note: str = "",
) -> StageError:
    """Return a StageError with the error's traceback, or a DeviceLostError if its device is lost.

    A ConfigError, which says all by itself, becomes a StageConfigError.

    Args:
        note: what to add to the cause; for the others see StageError.
    """
    if isinstance(error, ConfigError):
        return StageConfigError(stage, phase, str(error), "", step, microbatch)
    kind = DeviceLostError if devices.is_lost(error) else StageError
    return kind(
        stage,
        phase,
        f"{one_line(error)}{note}{devices.memory_advice(error)}",
        "".join(traceback.format_exception(error)),
        step,
        microbatch,
        received,
    )
