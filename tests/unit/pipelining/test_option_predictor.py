"""Steps under other options, predicted from steps whose times are computed."""

from __future__ import annotations

import pytest

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import MeasuredSteps
from rpcmp.pipelining.option_predictor import OptionPredictor
from rpcmp.pipelining.setting_grid import options_to_try
from rpcmp.pipelining.simulation import ActionTimes
from tests.support.settings import chain

MS = 1e-3


def truth(config: Config, options: ScheduleOptions, slower: float = 1.0) -> float:
    """Return the seconds of a step whose actions take 1 ms times `slower`, and the optimizer 2."""
    times = dict.fromkeys(config.stage_names, ActionTimes(MS, MS, MS).scaled(slower))
    updates = dict.fromkeys(config.stage_names, 2 * slower * MS)
    return cost_model.step_seconds(options.on(config), times, updates)


def steps(config: Config, options: ScheduleOptions, slower: float = 1.0) -> MeasuredSteps:
    """Return these steps as they are measured, of which replicas have one part each."""
    busy = {}
    for stage in config.stage_names:
        each = slower * MS * config.turns_of(stage).num_replicas
        actions = config.num_microbatches * each
        split = cost_model.limits(options.on(config))[stage].splits
        gradients = {"B": actions, "W": actions} if split else {"B": 2 * actions}
        busy[stage] = {"F": actions, **gradients, "O": 2 * each}
    return MeasuredSteps(truth(config, options, slower), 0.0, busy)


def test_replicas_are_predicted_as_one_fast_host() -> None:
    config = chain(stages=[{"replicas": 2}, {"replicas": 2}], num_microbatches=16)
    options = options_to_try(config)
    assert {one.microbatches_per_message for one in options} == {1}
    predict = OptionPredictor(lambda one: one.on(config), options[0], steps(config, options[0]))
    expected = [truth(config, one) for one in options]
    assert [predict(one) for one in options] == pytest.approx(expected, 1e-2)


@pytest.mark.parametrize("is_best", [False, True])
def test_steps_under_a_schedule_teach_what_it_costs_and_no_other(is_best: bool) -> None:
    config = chain(schedule="auto", num_microbatches=8)
    first, *others = options_to_try(config)
    predict = OptionPredictor(lambda one: one.on(config), first, steps(config, first))
    tried, *split = [one for one in others if one.schedule == "zero-bubble"]
    assert split
    assert predict(tried) == pytest.approx(truth(config, tried), 1e-2)

    ratio = truth(config, tried, slower=1.5) / truth(config, first)
    predict.learn(tried, steps(config, tried, slower=1.5), ratio, is_best)

    expected = [truth(config, one, slower=1.5) for one in split]
    assert [predict(one) for one in split] == pytest.approx(expected, 1e-2)
    assert predict(first) == pytest.approx(truth(config, first), 1e-2)


def test_a_failed_trial_of_the_same_schedule_teaches_nothing() -> None:
    config = chain(num_microbatches=8)
    first, tried = options_to_try(config)[:2]
    assert first.schedule == tried.schedule
    predict = OptionPredictor(lambda one: one.on(config), first, steps(config, first))
    predict.learn(tried, steps(config, tried, slower=3.0), 3.0, is_best=False)
    assert predict(tried) == pytest.approx(truth(config, tried), 1e-2)
