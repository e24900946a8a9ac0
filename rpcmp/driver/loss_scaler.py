"""One loss scale for all stages, by the rules of `torch.amp.GradScaler`.

    every stage: unscale ──is each gradient finite?──> driver: all? ──step──> grow now and then
                                                                └─not all──> skip everywhere, shrink

It lives on the driver, which alone hears of all stages. What it is after a step is a part of the
run's progress, so that a run which goes on after a fault, or from a checkpoint, scales as one that
was never disturbed. Pure: numbers in, numbers out.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from rpcmp.config.run_sections import LossScalingConfig
from rpcmp.errors import LossScaleError

LOWEST = 2.0**-16
"""Of a scale that is of any use: float16 holds gradients up to 65504, so smaller ones mean that no
gradient will ever be finite."""


@dataclass(frozen=True)
class ScalerState:
    """What a scaler is between two steps.

    Attributes:
        scale: what the next step's loss is multiplied by; a float32.
        growth_tracker: steps in a row since it last changed.
        skipped: how many steps have been skipped in the whole run.
    """

    scale: float
    growth_tracker: int = 0
    skipped: int = 0


class LossScaler:
    """The scale of one job's loss.

    Args:
        config: how it changes.

    Attributes:
        initial: what it was before the first step.
        state: what it is now.
    """

    def __init__(self, config: LossScalingConfig) -> None:
        self._config = config
        self.initial = self.state = ScalerState(as_float32(config.initial))

    @property
    def inverse(self) -> float:
        """What gradients of the scaled loss are multiplied by; a float32."""
        return as_float32(1.0 / self.state.scale)

    @property
    def is_hopeless(self) -> bool:
        """Whether steps have been skipped for so long that no gradient will ever be finite."""
        return self.state.scale < LOWEST

    def require_useful(self, step: int) -> None:
        """Check that gradients may still become finite.

        Args:
            step: the last one that was done, or skipped.

        Raises:
            LossScaleError: see `is_hopeless`.
        """
        if self.is_hopeless:
            raise LossScaleError(self.state.scale, step)

    def update(self, is_finite: bool) -> None:
        """Hear whether all gradients of a step were finite; the next step has another scale."""
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
    """The nearest number that float32 has."""
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(rounded)
