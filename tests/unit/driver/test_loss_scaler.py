"""The loss scaler: its numbers equal `torch.amp.GradScaler`; for JSON see test_progress.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.amp import GradScaler

from rpcmp.config.run_sections import LossScalingConfig
from rpcmp.driver.loss_scaler import LOWEST, LossScaler
from rpcmp.errors import LossScaleError

CONFIGS = st.builds(
    LossScalingConfig,
    initial=st.floats(1.0, 2.0**126),
    growth_factor=st.floats(1.0, 2.0**20, exclude_min=True),
    backoff_factor=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    growth_interval=st.integers(1, 4),
)


def torch_scaler_states(
    config: LossScalingConfig, steps: list[bool]
) -> Iterator[tuple[float, float, int]]:
    """Yield the state of torch's scaler before each step and after the last one.

    The state is the scale, the factor that gradients are multiplied by, and the growth tracker.
    """
    scaler = GradScaler("cpu", *config.model_dump().values())
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight])
    for is_finite in (*steps, True):
        scale = float(scaler.scale(torch.ones(())))
        weight.grad = torch.tensor(1.0 if is_finite else math.nan)
        tracker = scaler.state_dict()["_growth_tracker"]
        scaler.unscale_(optimizer)
        yield scale, weight.grad.item(), tracker
        scaler.step(optimizer)
        scaler.update()


@given(CONFIGS, st.lists(st.booleans(), max_size=30))
def test_scale_inverse_and_growth_equal_torch(config: LossScalingConfig, steps: list[bool]) -> None:
    scaler = LossScaler(config)
    for is_finite, (scale, inverse, tracker) in zip(
        (*steps, True), torch_scaler_states(config, steps), strict=True
    ):
        assert (scaler.state.scale, scaler.state.growth_tracker) == (scale, tracker)
        if is_finite and scale:
            assert scaler.inverse == inverse
        scaler.update(is_finite)
    assert scaler.state.skipped == steps.count(False)


def test_require_useful_raises_below_the_lowest_scale() -> None:
    scaler = LossScaler(LossScalingConfig())
    for _ in range(32):
        scaler.update(False)
    assert scaler.state.scale == LOWEST
    scaler.require_useful(32)
    scaler.update(False)
    with pytest.raises(LossScaleError, match=r"fell to 7\.6e-06 at step 33"):
        scaler.require_useful(33)
