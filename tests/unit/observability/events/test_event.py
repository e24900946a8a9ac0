"""The JSON form of events, which `--json`, run folders and loggers share."""

from __future__ import annotations

import math

import pytest

from rpcmp.config.cross_checks import RESERVED_METRICS
from rpcmp.observability.events import (
    EarlyStopEvent,
    EvalEvent,
    ResumedEvent,
    StepEvent,
    WarningEvent,
    parse,
)

STEP = StepEvent(
    step=3,
    epoch=1,
    loss=0.5,
    samples_per_s=100.0,
    step_s=0.1,
    data_share=0.0,
    busy={"a": 0.25},
    busy_seconds={"a": {"F": 0.025}},
    learning_rate=None,
    learning_rates={"a": None},
)


def test_keys_are_in_the_order_of_the_fields_and_the_stamp_is_last() -> None:
    assert list(STEP.stamped(1.5, 2).to_json()) == [
        *("event", "step", "epoch", "loss", "samples_per_s", "step_s", "data_share", "busy"),
        *("busy_seconds", "learning_rate", "learning_rates", "time", "generation"),
    ]


def test_an_optional_key_is_absent_while_a_required_one_is_null() -> None:
    nothing = EarlyStopEvent(metric="f1", mode="max", best=None, best_step=0, waited=2, step=4)
    assert nothing.to_json() == {
        "event": "early_stop",
        "metric": "f1",
        "mode": "max",
        "best": None,
        "best_step": 0,
        "waited": 2,
        "step": 4,
    }
    assert ResumedEvent(step=0, changed=[]).to_json() == {
        "event": "resumed",
        "step": 0,
        "changed": [],
    }
    assert list(ResumedEvent(step=4, run="r", changed=[]).to_json())[1:] == [
        *("step", "run", "changed")
    ]


def test_a_log_line_has_its_stamp_first() -> None:
    line = {"event": "log", "time": 1.0, "generation": 2, "stage": "a", "step": 3}
    line |= {"level": "INFO", "logger": "stdout", "text": "t", "count": 1}
    event = parse(line)
    assert event is not None
    assert list(event.to_json().items()) == list(line.items())


@pytest.mark.parametrize("metric", ["fit.samples", "values"])
def test_metrics_are_keys_of_an_evaluation(metric: str) -> None:
    event = EvalEvent(step=4, epoch=1, values={"loss": 0.5, metric: 23.0})
    data = {"event": "eval", "step": 4, "epoch": 1, "loss": 0.5, metric: 23.0}
    assert event.to_json() == data
    assert parse(data) == event
    assert {*event.stamped(1.0, 1).to_json()} - {metric} == RESERVED_METRICS


def test_parse_accepts_events_and_keys_of_other_versions() -> None:
    assert parse({"event": "of another version"}) is None
    warning = parse({"event": "warning", "text": "careful", "advice": "none"})
    assert warning == WarningEvent(text="careful")
    step = parse({"event": "step", "step": 3, "loss": None}, complete=False)
    assert isinstance(step, StepEvent)
    assert (step.step, step.busy) == (3, {})
    assert math.isnan(step.loss)
    assert math.isnan(step.data_share)


@pytest.mark.parametrize(
    "data",
    [
        {"event": "warning"},
        {"event": "warning", "text": 3},
        {"event": "start", "steps": "many"},
        {"event": "start", "steps": 1, "time": "now"},
        {"event": "eval", "step": 1, "epoch": 1, "loss": "low"},
    ],
)
def test_an_event_with_a_missing_or_wrong_value_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(data["event"])):
        parse(data)
