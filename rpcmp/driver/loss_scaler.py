"""One loss scale for all stages, by the rules of `torch.amp.GradScaler`.

    every stage: unscale ──is each gradient finite?──> driver: all? ──step──> grow at intervals
                                                                └─not all──> skip everywhere, shrink

Its state is part of the run's progress, so a run that resumes after a fault, or from a checkpoint,
scales as if it had not been interrupted.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from rpcmp.config.run_sections import LossScalingConfig
from rpcmp.errors import LossScaleError

LOWEST = 2.0**-16
"""The smallest useful scale: float16 holds gradients up to 65504, so if even a smaller scale gives
infinite gradients, no gradient will ever be finite."""


@dataclass(frozen=True)
class ScalerState:
    """The state of a scaler between two steps.

    Attributes:
        scale: the factor of the next step's loss; a float32.
        growth_tracker: consecutive steps since the scale last changed.
        skipped: number of steps that have been skipped in the whole run.
    """

    scale: float
    growth_tracker: int = 0
    skipped: int = 0


class LossScaler:
    """The scale of one job's loss.

    Attributes:
        initial: the state before the first step.
        state: the present state.
    """

    def __init__(self, config: LossScalingConfig) -> None:
        self._config = config
        self.initial = self.state = ScalerState(as_float32(config.initial))

    @property
    def inverse(self) -> float:
        """The factor that unscales gradients; a float32."""
        return as_float32(1.0 / self.state.scale)

    def require_useful(self, step: int) -> None:
        """Raise LossScaleError if the scale is so low that gradients will never be finite."""
        if self.state.scale < LOWEST:
            raise LossScaleError(self.state.scale, step)

    def update(self, is_finite: bool) -> None:
        """Set the next step's scale, given whether all gradients of this step are finite."""
        if not is_finite:
            scale = as_float32(self.state.scale * self._config.backoff_factor)
            self.state = ScalerState(scale, 0, self.state.skipped + 1)
            return
        scale, tracker = self.state.scale, self.state.growth_tracker + 1
        if tracker == self._config.growth_interval:
            grown, tracker = as_float32(scale * self._config.growth_factor), 0
            scale = grown if math.isfinite(grown) else scale
        self.state = ScalerState(scale, tracker, self.state.skipped)


def as_float32(value: float) -> float:
    """Round to the nearest float32."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)
