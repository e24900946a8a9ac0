"""A step's model that is corrected by steps, on machines whose times are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import (
    Calibration,
    Forecast,
    MeasuredSteps,
    summarize,
    what_was_wrong,
)
from rpcmp.pipelining.setting_grid import MEMORY_SHARE, options_to_try
from rpcmp.pipelining.simulation import ActionTimes, SharedCores
from tests.support.profiles import host, layer
from tests.support.settings import chain

MS = 1e-3
COUNT = 4
"""Micro-batches of `chain`."""


class Step(NamedTuple):
    step_s: float
    busy_seconds: Mapping[str, Mapping[str, float]]
    data_share: float = 0.0
    core_seconds: Mapping[str, Mapping[str, float]] | None = None


def measured(
    config: Config, times: Mapping[str, ActionTimes], message_s: float, update_s: float = 1 * MS
) -> MeasuredSteps:
    """Return the steps of a machine that behaves as the model says."""
    updates = dict.fromkeys(times, update_s)
    seconds = cost_model.step_seconds(config, times, updates, message_s)
    busy = {
        name: {"F": COUNT * each.forward, "B": COUNT * (each.backward + each.weight), "O": update_s}
        for name, each in times.items()
    }
    return MeasuredSteps(seconds, 0.0, busy)


def equal_times(config: Config, seconds: float = 2 * MS) -> dict[str, ActionTimes]:
    return dict.fromkeys(config.stage_names, ActionTimes(seconds, seconds, seconds))


def test_the_medians_of_the_workers_of_a_stage_are_added() -> None:
    config = chain(stages=[{"replicas": 2}, {}])
    kinds = ({"F": 1.0, "O": 0.5}, {"F": 9.0, "O": 0.5}, {"F": 2.0, "O": 0.5})
    first, second, last = (worker.label for worker in config.workers)
    steps = [
        Step(number, {first: one, second: one, last: {"B": 3.0}}, number / 10)
        for number, one in enumerate(kinds, 1)
    ]
    found = summarize(config, steps)
    assert (found.step_s, found.data_share) == (2, 0.2)
    assert found.busy == {"stage0": {"F": 4.0, "O": 1.0}, "stage1": {"B": 3.0}}


@pytest.mark.parametrize("message_s", [0.0, 1 * MS, 20 * MS])
def test_what_a_message_costs_is_found(message_s: float) -> None:
    config = chain()
    seen = measured(config, equal_times(config), message_s)
    found = Calibration.fit(config, seen)
    assert found.message_s == pytest.approx(message_s, abs=seen.step_s / 1000)
    other = config.model_copy(update={"schedule": "zero-bubble"})
    expected = cost_model.step_seconds(other, equal_times(config), found.updates, message_s)
    assert found.step_seconds(other) == pytest.approx(expected, rel=1e-2)


FOUR = chain(model={"layers": "zoo:mlp", "num_stages": 4}, num_microbatches=8)
"""Four stages on two cores, unless a test says otherwise."""

CORES = [SharedCores(2, dict.fromkeys(FOUR.stage_names, 0.0))]


def step_on_cores(
    config: Config, times: Mapping[str, ActionTimes], message_s: float, busy: float, used: float
) -> Step:
    """Return a step on two cores, in which each stage is `busy` for so many times its `times`."""
    updates = dict.fromkeys(times, 0.0)
    seconds = cost_model.step_seconds(config, times, updates, message_s, shared=CORES)
    each = {name: one.scaled(config.num_microbatches) for name, one in times.items()}
    return Step(
        seconds,
        {
            name: {"F": busy * one.forward, "B": busy * (one.total - one.forward)}
            for name, one in each.items()
        },
        core_seconds={
            name: {"used": used * one.total, "waited": (busy - 1) * one.total}
            for name, one in each.items()
        },
    )


@pytest.mark.parametrize("message_s", [0.5 * MS, 4 * MS])
def test_other_options_are_predicted_where_stages_share_cores(message_s: float) -> None:
    times = equal_times(FOUR)
    seen = summarize(FOUR, [step_on_cores(FOUR, times, message_s, 1.8, 1.0)], CORES)
    found = Calibration.fit(FOUR, seen)
    assert found.step_seconds(FOUR) == pytest.approx(seen.step_s, rel=0.03)
    without = Calibration.fit(FOUR, seen._replace(shared=()))
    updates, errors = dict.fromkeys(times, 0.0), []
    for options in options_to_try(FOUR):
        other = options.on(FOUR)
        expected = cost_model.step_seconds(other, times, updates, message_s, shared=CORES)
        # Who is first in a queue may change with a message's cost, and so may the step by a bit.
        assert found.step_seconds(other) == pytest.approx(expected, rel=0.05)
        errors.append(abs(without.step_seconds(other) / expected - 1))
    assert max(errors) > 0.2


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("update_s", [0.0, 10 * MS])
def test_no_step_takes_less_than_its_cores_allow(number: int, update_s: float) -> None:
    times, names = equal_times(FOUR), FOUR.stage_names
    updates, cores = dict.fromkeys(names, update_s), SharedCores(number, dict.fromkeys(names, 0.0))
    least = (4 * 8 * times["stage0"].total + 4 * update_s) / number
    for options in options_to_try(FOUR):
        seconds = cost_model.step_seconds(options.on(FOUR), times, updates, shared=[cores])
        assert seconds >= least * (1 - 1e-9)


@pytest.mark.parametrize(
    ("used", "waited", "cores", "expected"),
    [
        (1.0, 0.5, 2, 0.5),
        (1.0, 0.8, 2, 0.6),  # some of it was between two actions
        (0.2, 0.1, 2, None),  # it sleeps, or has an accelerator
        (1.0, 0.5, 4, None),  # there are enough
        (1.5, 0.1, 2, None),  # it is a core of its own, on another host of that name
    ],
)
def test_cores_count_where_they_are_too_few_for_what_computes_on_them(
    used: float, waited: float, cores: int, expected: float | None
) -> None:
    names = FOUR.stage_names
    step = Step(
        2.0,
        {name: {"F": 1.2, "B": 0.4} for name in names},
        core_seconds={name: {"used": used, "waited": waited} for name in names},
    )
    seen = summarize(FOUR, [step], [SharedCores(cores, dict.fromkeys(names, 0.0))])
    assert seen.busy["stage0"] == {"F": 1.2, "B": 0.4}
    if expected is None:
        assert seen.shared == []
        assert seen.computing == seen.busy
    else:
        (found,) = seen.shared
        assert found.number == cores
        assert found.waited == pytest.approx(dict.fromkeys(names, expected))
        part = 1 - expected / 1.6
        assert seen.computing["stage3"] == pytest.approx({"F": 1.2 * part, "B": 0.4 * part})
    unknown = summarize(FOUR, [step._replace(core_seconds=None)], CORES)
    assert unknown.shared == []


def test_a_stage_is_busy_while_it_waits_for_a_core() -> None:
    hosts = [host([layer(2 * MS)] * 4, index, num_microbatches=8) for index in range(4)]
    seen = summarize(FOUR, [step_on_cores(FOUR, equal_times(FOUR), 1 * MS, 1.8, 1.0)], CORES)
    predicted = Forecast(hosts, [1, 1, 1, 1]).corrected(FOUR, seen).predict(FOUR)
    busy = {name: part.busy_s for name, part in predicted.stages.items()}
    assert busy == pytest.approx(dict.fromkeys(busy, 1.8 * 8 * 6 * MS))
    assert predicted.step_s == pytest.approx(seen.step_s, rel=1e-2)
    assert what_was_wrong(FOUR, predicted, seen) == ""


def forecast(seconds: list[float], balance: list[int]) -> Forecast:
    """Return a forecast by layers that take so long, equal on both hosts of `chain`."""
    layers = [layer(each) for each in seconds]
    return Forecast([host(layers, index, num_microbatches=COUNT) for index in (0, 1)], balance)


def test_layers_that_move_take_their_own_time_with_them() -> None:
    config = chain()
    before = forecast([4 * MS, 4 * MS, 8 * MS], [1, 2])
    own = {"stage0": ActionTimes(3 * MS, 1 * MS, 1 * MS), "stage1": equal_times(config)["stage1"]}
    known = Calibration.fit(config, measured(config, own, 1 * MS))
    moved = known.moved(before.hosts, [1, 2], [2, 1])
    assert moved.times["stage0"] == pytest.approx((5 * MS, 2 * MS, 2 * MS))
    assert moved.times["stage1"] == pytest.approx((0.0, 1 * MS, 1 * MS))
    assert moved.message_s == known.message_s
    scaled = known.moved(before.hosts, [1, 2], [2, 1], in_proportion=True)
    assert scaled.times["stage0"] == pytest.approx((6 * MS, 2 * MS, 2 * MS))
    assert scaled.times["stage1"] == pytest.approx((4 / 3 * MS, 4 / 3 * MS, 4 / 3 * MS))


def test_a_rehearsed_forecast_says_what_was_measured() -> None:
    config = chain()
    seen = measured(config, equal_times(config), 2 * MS)
    alone = forecast([1 * MS] * 4, [2, 2])
    assert not alone.predict(config).is_rehearsed
    found = alone.corrected(config, seen).predict(config)
    assert found.is_rehearsed
    assert found.step_s == pytest.approx(seen.step_s, rel=1e-2)
    stage = found.stages["stage1"]
    assert stage.busy_s == pytest.approx(COUNT * 6 * MS + 1 * MS)
    assert stage.messages_s == pytest.approx(2 * COUNT * 2 * MS, rel=0.05)


@pytest.mark.parametrize(
    ("limits", "count"),
    [((None, None), 1), ((15_000, 400_000), 3), ((400_000, 400_000), 6)],
)
def test_a_run_starts_with_what_is_predicted_to_be_fastest_and_fits(
    limits: tuple[int | None, int | None], count: int
) -> None:
    """Each layer holds 1 kB of activations for a micro-batch."""
    config = chain()
    layers = [layer(1 * MS, activations=1000, received=0)] * 4
    hosts = [
        host(layers, index, limit=limit, num_microbatches=COUNT)
        for index, limit in enumerate(limits)
    ]
    seen = measured(config, equal_times(config), 5 * MS)
    alone = Forecast(hosts, [2, 2])
    found, known = alone.corrected(config, seen), Calibration.fit(config, seen)
    own, *others = options_to_try(config)
    usual = cost_model.held(config)

    def fits(options: ScheduleOptions) -> bool:
        held = cost_model.held(options.on(config))
        return all(
            2000 * (held[stage] - usual[stage])
            <= (MEMORY_SHARE * (limit - 2000 * usual[stage] - 10) if limit else 0)
            for stage, limit in zip(usual, limits, strict=True)
        )

    seconds = {one: known.step_seconds(one.on(config)) for one in (own, *filter(fits, others))}
    assert len(seconds) == count
    fastest = found.fastest_options(config)
    assert seconds[fastest] == min(seconds.values())
    assert alone.fastest_options(config) == own
    assert found.fastest_options(fastest.on(config)) == fastest


def test_a_stage_that_computes_much_besides_its_layers_gets_fewer() -> None:
    config = chain()
    as_alone, slow = ActionTimes(2 * MS, 1 * MS, 1 * MS), ActionTimes(4 * MS, 2 * MS, 2 * MS)
    seen = measured(config, {"stage0": as_alone, "stage1": slow}, 0.0, update_s=0.0)
    start = forecast([1 * MS] * 8, [4, 4]).corrected(config, seen)
    better = start.improved(config)
    assert better.balance == [6, 2]
    assert better.predict(config).step_s < start.predict(config).step_s
    assert better.improved(config).balance == [6, 2]


def test_what_is_better_fits_into_memory_under_the_options_that_there_are() -> None:
    """The first stage has room for a fifth layer, unless it holds four micro-batches, not two."""
    own = chain(schedule="1f1b")
    layers = [layer(1 * MS, activations=10) for _ in range(8)]
    hosts = [host(layers, index, num_microbatches=COUNT, held=2) for index in (0, 1)]
    hosts[0] = replace(hosts[0], limit_bytes=hosts[0].memory(0, 6))
    as_alone, slow = ActionTimes(2 * MS, 1 * MS, 1 * MS), ActionTimes(4 * MS, 2 * MS, 2 * MS)
    for update, balance in (({}, [6, 2]), ({"microbatches_per_message": 2}, [4, 4])):
        config = own.model_copy(update=update)
        seen = measured(config, {"stage0": as_alone, "stage1": slow}, 0.0, update_s=0.0)
        start = Forecast(hosts, [4, 4]).corrected(config, seen)
        assert start.improved(config).balance == balance


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_machine_that_is_slower_on_the_whole_moves_no_layers(factor: float) -> None:
    config = chain()
    seconds = [1 * MS, 2 * MS, 3 * MS, 2 * MS, 1 * MS, 4 * MS, 1 * MS, 2 * MS]
    alone = forecast(seconds, [4, 4])
    times = cost_model.times_of(alone.hosts, alone.balance)
    slower = {stage: each.scaled(factor) for stage, each in times.items()}
    found = alone.corrected(config, measured(config, slower, 0.0, update_s=0.0))
    assert found.improved(config) is found


def test_samples_that_take_longer_than_the_stages_set_the_time() -> None:
    config = chain()
    seen = measured(config, equal_times(config), 1 * MS)._replace(step_s=0.2, data_share=0.95)
    predicted = forecast([1 * MS] * 4, [2, 2]).corrected(config, seen).predict(config)
    assert (predicted.step_s, predicted.loading_s) == (0.2, 0.2)
    assert {stage.messages_s for stage in predicted.stages.values()} == {0.0}
    assert what_was_wrong(config, predicted, seen) == ""


def test_without_steps_nothing_is_improved() -> None:
    alone = forecast([4 * MS] * 8, [7, 1])
    assert alone.improved(chain()) is alone


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"times": 3 * MS}, "stage0 computes 37.0 ms a step, not 25.0"),
    ({"message_s": 6 * MS}, "messages and pauses of the busiest stage take"),
    ({"data_share": 0.9}, "loading the samples takes"),
]


@pytest.mark.parametrize(("now", "expected"), WRONG)
def test_the_term_that_was_predicted_worst_is_named(now: dict[str, Any], expected: str) -> None:
    config = chain()
    known = measured(config, equal_times(config), 1 * MS)
    predicted = forecast([1 * MS] * 4, [2, 2]).corrected(config, known).predict(config)
    times = equal_times(config, now.get("times", 2 * MS))
    seen = measured(config, times, now.get("message_s", 1 * MS))
    if share := now.get("data_share"):
        seen = seen._replace(step_s=seen.step_s / (1 - share), data_share=share)
    text = what_was_wrong(config, predicted, seen)
    assert text.startswith(expected)
    assert bool(text) == bool(expected)
