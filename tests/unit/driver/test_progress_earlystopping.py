"""Early stopping and the best step: both follow from the evaluations of a run."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.config.run_sections import EarlyStoppingConfig, Mode, guess_direction, is_better
from rpcmp.config.schema import Config
from rpcmp.driver.progress import Best, EarlyStopping, TrainingProgress
from tests.support.graphs import chain_of

NAN = math.nan


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("loss", "min"),
        ("val_MAE", "min"),
        ("top1-accuracy", "max"),
        ("stats.f1", "max"),
        ("f1_loss", "min"),
        ("score-error", "min"),
        ("quality", None),
        ("lossless", None),
    ],
)
def test_mode_follows_from_the_metrics_name(metric: str, mode: Mode | None) -> None:
    assert guess_direction(metric) == mode


def test_value_is_better_beyond_min_delta() -> None:
    assert is_better(0.4, 0.5, "min")
    assert is_better(0.5, 0.4, "max")
    assert not is_better(0.5, 0.5, "min")
    assert not is_better(0.45, 0.5, "min", by=0.1)
    assert is_better(0.375, 0.5, "min", by=0.1)
    assert not is_better(0.75, 0.5, "max", by=0.25)
    assert is_better(math.inf, None, "min")
    assert not is_better(NAN, None, "min")
    assert not is_better(NAN, math.inf, "min")


def stopped_after(values: list[float], patience: int, mode: Mode, min_delta: float) -> int:
    """Return the number of evaluations until the run stops early, or of all if it does not."""
    state = EarlyStopping("m", mode)
    for step, value in enumerate(values, start=1):
        state = state.after(step, value, min_delta)
        if state.is_over(patience):
            return step
    return len(values)


@pytest.mark.parametrize(
    ("values", "patience", "mode", "min_delta", "count"),
    [
        ([0.50, 0.40, 0.41, NAN, 0.39, 0.40, 0.395, 0.42, 0.1], 3, "min", 0.0, 8),
        ([0.5, 0.5, 0.5], 1, "min", 0.0, 2),
        ([0.5, 0.6, 0.7, 0.8], 1, "max", 0.0, 4),
        ([0.5, 0.45, 0.41, 0.3], 2, "min", 0.1, 3),  # each only a little better than the one before
        ([NAN, NAN, NAN], 2, "max", 0.0, 2),
    ],
)
def test_early_stopping_is_over_after_its_patience(
    values: list[float], patience: int, mode: Mode, min_delta: float, count: int
) -> None:
    assert stopped_after(values, patience, mode, min_delta) == count


@given(
    values=st.lists(st.floats(width=16), min_size=1),
    repeated=st.lists(st.booleans(), min_size=50),
    mode=st.sampled_from(["min", "max"]),
    min_delta=st.floats(0, 4),
)
def test_repeated_evaluations_change_nothing(
    values: list[float], repeated: list[bool], mode: Mode, min_delta: float
) -> None:
    once = again = EarlyStopping("m", mode)
    for step, value in enumerate(values, start=1):
        once = once.after(step, value, min_delta)
        for _ in range(1 + repeated[step % len(repeated)]):
            again = again.after(step, value, min_delta)
    assert once == again
    finite = [value for value in values if not math.isnan(value)]
    assert (once.best is None) == (not finite)
    assert 0 <= once.waited <= len(values)
    assert once.waited == once.step - once.best_step
    if finite and min_delta == 0:
        assert once.best == (min(finite) if mode == "min" else max(finite))


def test_early_stopping_restarts_for_another_metric_or_mode_but_not_for_more_patience() -> None:
    state = EarlyStopping("loss", "min", 0.5, 10, 2, 30)
    assert EarlyStopping.resume(EarlyStoppingConfig(patience=9), state) == state
    fresh = EarlyStopping("accuracy", "max")
    assert EarlyStopping.resume(EarlyStoppingConfig(metric="accuracy"), state) == fresh
    assert EarlyStopping.resume(EarlyStoppingConfig(mode="max"), state).step == 0
    assert EarlyStopping.resume(EarlyStoppingConfig(), None) == EarlyStopping("loss", "min")


@given(st.lists(st.floats(width=16)), st.sampled_from(["min", "max"]))
def test_best_is_the_first_of_equal_values(values: list[float], mode: Mode) -> None:
    best: Best | None = None
    for step, value in enumerate(values, start=1):
        best = Best("m", mode, value, step).better_of(best)
        best = Best("m", mode, value, step).better_of(best)  # done again after a fault
    numbers = [value for value in values if not math.isnan(value)]
    if not numbers:
        assert best is None
        return
    assert best is not None
    assert best.value == (min(numbers) if mode == "min" else max(numbers))
    assert best.step == 1 + values.index(best.value)


def test_progress_drops_state_of_other_metrics_under_a_changed_config() -> None:
    def config(**more: Any) -> Config:
        return chain_of(2, metrics={"f1": "m:f"}, data={"train": "m:f", "test": "m:f"}, **more)

    stopping, best = EarlyStopping("loss", "min", 0.5, 10, 2, 30), Best("f1", "max", 0.5, 20)
    before = TrainingProgress(step=30, loss=0.0, stopping=stopping, best=best)
    same = config(early_stopping={}, checkpoint={"dir": "d", "best": "f1"})
    assert before.for_config(same) == before
    none = before.for_config(config(checkpoint={"dir": "d"}))
    assert (none.stopping, none.best) == (None, None)
    other = config(early_stopping={"metric": "f1"}, checkpoint={"dir": "d", "best": "loss"})
    changed = before.for_config(other)
    assert (changed.stopping, changed.best) == (EarlyStopping("f1", "max"), None)
