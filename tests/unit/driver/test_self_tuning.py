"""Options that a run finds by itself, on machines whose times are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self, cast

import pytest

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.driver.progress import TrainingProgress
from rpcmp.driver.self_tuning import MOST_TRIED, MOST_UNSURE, UNSURE, SelfTuning
from rpcmp.driver.stage_group import StageGroup
from rpcmp.observability.events import Event, ScheduleEvent, StepEvent
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.setting_grid import FASTER, options_to_try
from rpcmp.pipelining.simulation import ActionTimes, SharedCores
from tests.support.runevents import typed
from tests.support.settings import chain

MS = 1e-3
TIMES = ActionTimes(2 * MS, 2 * MS, 2 * MS)


@dataclass
class Machine:
    """A run on a machine whose steps take as long as the simulation says.

    Attributes:
        message_s: seconds that a message costs.
        slow: seconds that steps under some options take besides.
        start: what an earlier group has found, and what it was trying.
        restarts: groups lost before.
        data_share: share of a step in which the driver waits for samples.
        used: options of each step so far.
        changes: options that the group was told to change to.
        found: what the searches have found.
    """

    config: Config
    total: int = 1000
    message_s: float = 0.0
    slow: Callable[[ScheduleOptions], float] = lambda options: 0.0
    start: list[ScheduleOptions] = field(default_factory=list)
    restarts: int = 0
    data_share: float = 0.0
    changes: list[ScheduleOptions] = field(default_factory=list)
    used: list[ScheduleOptions] = field(default_factory=list)
    found: list[ScheduleEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.num_full_microbatches = config.num_full_microbatches
        before = TrainingProgress(options=[one.model_dump() for one in self.start])
        group = cast(StageGroup, self)
        self.tuning = SelfTuning(
            *(config, group, options_to_try(config)[1:], before, self.total),
            self._add_event,
            self.restarts,
        )
        self.tuning.start()

    @property
    def workers(self) -> Self:
        return self

    def everywhere(self, method: Callable[..., object]) -> dict[str, object]:
        answer = getattr(self, method.__name__)()
        return {worker.label: answer for worker in self.config.workers}

    def shared_cores(self) -> list[SharedCores]:
        return []

    def memory(self) -> dict[str, int]:
        return {"idle": 1 << 20, "peak": 2 << 20}

    def free_memory(self) -> tuple[str, int | None]:
        return "here", 1 << 30

    def _add_event(self, event: Event) -> None:
        assert isinstance(event, ScheduleEvent)
        self.found.append(event)

    def reschedule(self, config: Config) -> None:
        self.changes.append(config.options)

    def run(self, steps: int) -> ScheduleOptions:
        """Train further steps; returns the options of the last one."""
        for step in range(len(self.used) + 1, len(self.used) + steps + 1):
            if self.tuning.is_changing:
                self.tuning.change(step)
                assert self.changes[-1] == self.tuning.current
            self.used.append(self.tuning.current)
            self.tuning.add(self.step(step, self.tuning.current))
        return self.tuning.current

    def seconds(self, options: ScheduleOptions) -> float:
        names = self.config.stage_names
        times, updates = dict.fromkeys(names, TIMES), dict.fromkeys(names, 0.0)
        under = options.on(self.config)
        predicted = cost_model.step_seconds(under, times, updates, self.message_s)
        return predicted + self.slow(options)

    def step(self, number: int, options: ScheduleOptions) -> StepEvent:
        seconds = self.seconds(options)
        count = self.config.num_microbatches
        limits = cost_model.limits(options.on(self.config))
        each = TIMES.scaled(count)
        kinds = {
            name: {"F": each.forward, "B": each.backward, "W": each.weight}
            if limits[name].splits
            else {"F": each.forward, "B": each.backward + each.weight}
            for name in self.config.stage_names
        }
        event = typed(
            {
                "event": "step",
                "step": number,
                "samples_per_s": 16 / seconds,
                "step_s": seconds,
                "data_share": self.data_share,
                "busy_seconds": kinds,
            }
        )
        assert isinstance(event, StepEvent)
        return event

    @property
    def best(self) -> ScheduleOptions:
        return min(options_to_try(self.config), key=self.seconds)


@pytest.mark.parametrize("message_s", [0.0, 1 * MS, 20 * MS])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_fastest_options_are_found(stages: int, message_s: float) -> None:
    config = chain(
        model={"layers": "zoo:mlp", "num_stages": stages},
        num_microbatches=16,
        data={"train": "zoo:regression", "batch_size": 16},
    )
    machine = Machine(config, message_s=message_s)
    chosen = machine.run(300)
    assert machine.seconds(chosen) <= 1.03 * machine.seconds(machine.best)
    assert machine.used[0] == config.options
    (found,) = machine.found
    assert found.chosen == chosen.without_count
    assert found.measured[found.chosen] <= min(found.measured.values()) / FASTER
    assert len(found.measured) <= 1 + MOST_TRIED


def test_what_a_schedule_costs_is_learned_from_its_first_trial() -> None:
    """To split backwards costs so much that nothing with "zero-bubble" is faster than what is."""
    config = chain(schedule="auto", num_microbatches=8)
    own = config.options
    wanted = own.model_copy(update={"microbatches_per_message": 2})

    def slow(options: ScheduleOptions) -> float:
        parts = {wanted: 0.8 * usual(own) - usual(wanted)}
        return parts.get(options, 0.0 if options.schedule == "1f1b" else 0.4 * usual(own))

    usual = Machine(config, message_s=1 * MS).seconds
    machine = Machine(config, message_s=1 * MS, slow=slow)
    assert machine.run(1000) == wanted
    assert len({one for one in machine.used if one.schedule != "1f1b"}) == 1


def test_what_is_slower_than_predicted_is_left_after_one_block() -> None:
    """The machine has one core, so that no schedule fills a bubble."""
    config = chain()
    own = config.options
    machine = Machine(config, slow=lambda options: 0.0 if options == own else 1.0)
    assert machine.run(300) == own
    (found,) = machine.found
    assert found.chosen == "1f1b"
    assert sum(options != own for options in machine.used) <= 4 * len(found.measured)


def test_the_shorter_a_run_and_the_more_has_failed_the_less_is_tried() -> None:
    config = chain(num_microbatches=8)
    own = config.options

    def tried(total: int) -> int:
        machine = Machine(
            config, total, message_s=1 * MS, slow=lambda options: 0.0 if options == own else 1.0
        )
        machine.run(total)
        return sum(len(found.measured) - 1 for found in machine.found)

    assert [tried(total) for total in (12, 60, 500)] == [0, 1, 3]


def test_what_is_predicted_to_be_a_bit_slower_is_tried_if_many_steps_are_left() -> None:
    config = chain(schedule="1f1b", num_microbatches=16)
    usual = Machine(config).seconds
    own, wanted, *_ = options_to_try(config)
    assert FASTER < usual(wanted) / usual(own) < UNSURE

    def chosen(total: int) -> ScheduleOptions:
        def slow(options: ScheduleOptions) -> float:
            return 0.9 * usual(own) - usual(wanted) if options == wanted else 0.0

        return Machine(config, total=total, slow=slow).run(total)

    assert [chosen(total) for total in (60, 1000)] == [own, wanted]


@pytest.mark.cluster
def test_the_more_a_prediction_was_off_the_more_is_tried() -> None:
    config = chain(
        model={"layers": "m:layers", "num_stages": 4}, schedule="auto", num_microbatches=8
    )
    usual = Machine(config, message_s=1 * MS).seconds
    own, *others = options_to_try(config)
    first = min(others, key=usual)
    wanted = next(one for one in others if UNSURE < usual(one) / usual(first) < MOST_UNSURE)

    def chosen(part: float) -> ScheduleOptions:
        def slow(options: ScheduleOptions) -> float:
            parts = {first: part, wanted: 0.7}
            return parts[options] * usual(own) - usual(options) if options in parts else 0.0

        return Machine(config, message_s=1 * MS, slow=slow).run(1000)

    assert [chosen(usual(first) / usual(own)), chosen(0.92)] == [first, wanted]


@pytest.mark.parametrize(("is_own_unlucky", "truth"), [(False, 0.8), (True, 1.08)])
def test_one_block_of_bad_luck_does_not_decide(is_own_unlucky: bool, truth: float) -> None:
    """The first block of what is tried takes a quarter longer, or the one that it is next to."""
    config = chain(num_microbatches=4)
    own = config.options
    seen: list[ScheduleOptions] = []

    class Noisy(Machine):
        def seconds(self, options: ScheduleOptions) -> float:
            seen.append(options)
            is_first = seen.count(options) <= 6 and is_own_unlucky == (options == own)
            seconds = super().seconds(own) * (1.0 if options == own else truth)
            return 1.25 * seconds if is_first else seconds

    machine = Noisy(config)
    assert (machine.run(500) == own) == (truth > 1)
    assert set(machine.used) > {own}


@pytest.mark.parametrize(
    ("keys", "data_share"),
    [
        ({"schedule": "1f1b", "max_in_flight": 2, "microbatches_per_message": 1}, 0.0),
        ({"steps": 8}, 0.0),
        ({}, 0.6),
    ],
    ids=["all is given", "few steps", "the driver waits for samples"],
)
def test_nothing_is_tried_that_is_given_or_pays_for_nothing(
    keys: dict[str, object], data_share: float
) -> None:
    config = chain(**keys)
    machine = Machine(config, config.steps or 1000, message_s=5 * MS, data_share=data_share)
    machine.run(config.steps or 300)
    assert set(machine.used) == {config.options}
    assert machine.found == []


def test_all_trials_together_keep_to_a_part_of_the_free_memory() -> None:
    """A worker takes 1 MiB for each micro-batch that it may hold, of 64 MiB."""
    config = chain(num_microbatches=16)

    def taken(options: ScheduleOptions) -> int:
        return sum(cost_model.held(options.on(config)).values())

    class Growing(Machine):
        def everywhere(self, method: Callable[..., object]) -> dict[str, object]:
            held = [cost_model.held(options.on(config)) for options in self.used]
            most = {stage: max(each[stage] for each in held) << 20 for stage in held[0]}
            if method.__name__ == "free_memory":
                return dict.fromkeys(most, ("here", (64 << 20) - sum(most.values())))
            return {stage: {"idle": 0, "peak": peak} for stage, peak in most.items()}

    machine = Growing(config, message_s=5 * MS)
    machine.run(400)
    allowed = taken(config.options) + (64 - taken(config.options)) // 4
    assert taken(config.options) < max(map(taken, machine.used)) <= allowed
    assert max(map(taken, options_to_try(config))) > allowed


def test_what_was_tried_when_the_group_was_lost_is_not_tried_again() -> None:
    config = chain(num_microbatches=8)
    lost = Machine(config, message_s=1 * MS)
    while not lost.tuning.is_changing:
        lost.run(1)
    assert lost.tuning.known[0] == config.options.model_dump()
    (candidate,) = (
        one for one in options_to_try(config) if one.model_dump() == lost.tuning.known[1]
    )
    again = Machine(config, message_s=1 * MS, start=[config.options, candidate])
    (told,) = again.found
    assert (told.step, told.chosen, told.measured) == (0, config.options.without_count, {})
    again.run(300)
    assert candidate not in again.used
    assert candidate.model_dump() in again.tuning.known  # nor by the group after that


def test_predicted_options_have_to_prove_themselves() -> None:
    """A fault in the first steps may come from them."""
    config = chain(num_microbatches=8)
    own, predicted = options_to_try(config)[:2]
    machine = Machine(config, start=[predicted])
    for _ in range(4):
        assert machine.tuning.known == [own.model_dump(), predicted.model_dump()]
        assert machine.run(1) == predicted
    machine.run(300)
    assert own.model_dump() not in machine.tuning.known[:1]
    searched = [event.measured for event in machine.found if event.measured]
    assert next(iter(searched[0])) == predicted.without_count


def test_the_configs_own_options_are_not_tried_again_either() -> None:
    config = chain(num_microbatches=8)
    own, other = options_to_try(config)[:2]
    machine = Machine(config, start=[other, own], message_s=1 * MS)
    machine.run(300)
    assert own not in machine.used
    assert machine.tuning.known.count(own.model_dump()) == 1


def test_what_is_on_trial_when_a_run_pauses_may_be_tried_again() -> None:
    machine = Machine(chain(num_microbatches=4))
    while len(machine.tuning.known) == 1:
        machine.run(1)
    machine.tuning.close()
    assert machine.tuning.known == [machine.config.options.model_dump()]


def test_options_are_on_trial_until_the_group_has_changed_back() -> None:
    """A fault may come from them while the best has its turn, or while the pipeline drains."""
    machine = Machine(chain(num_microbatches=4), slow=lambda options: 0.0)
    own, seen = machine.config.options, set[tuple[bool, int]]()
    for _ in range(60):
        before = machine.tuning.current
        machine.run(1)
        seen.add((before == own, len(machine.tuning.known)))
        if before != own:
            assert before.model_dump() in machine.tuning.known
    assert (True, 2) in seen  # the best has its turn


def test_each_lost_group_delays_the_next_search() -> None:
    def first_change(restarts: int) -> int:
        machine = Machine(chain(), message_s=5 * MS, restarts=restarts)
        while not machine.tuning.is_changing:
            machine.run(1)
        return len(machine.used)

    first, second, third, fourth = map(first_change, range(4))
    assert fourth - third == 2 * (third - second) == 4 * (second - first) > 0


def test_another_search_begins_when_steps_take_longer_for_good() -> None:
    machine = Machine(chain(num_microbatches=16))
    first = machine.run(300)
    machine.message_s = 20 * MS
    machine.run(2)
    machine.message_s = 0.0
    machine.run(100)
    assert len(machine.found) == 1  # it was not for good
    machine.message_s = 20 * MS
    assert machine.run(300) == machine.best != first
    assert len(machine.found) == 2


def test_steps_of_smaller_mini_batches_do_not_count() -> None:
    config = chain(num_microbatches=8)
    expected = Machine(config, message_s=1 * MS).run(200)

    class Ragged(Machine):
        def step(self, number: int, options: ScheduleOptions) -> StepEvent:
            event = super().step(number, options)
            if number % 3:
                return event
            return replace(event, step_s=1e-4, samples_per_s=5e4)

    assert Ragged(config, message_s=1 * MS).run(400) == expected


def test_a_group_starts_with_what_the_one_before_has_found() -> None:
    config = chain(num_microbatches=8)
    found = Machine(config, message_s=1 * MS).run(300)
    again = Machine(config, message_s=1 * MS, start=[found], restarts=1)
    assert again.run(300) == found
    assert set(again.used) == set(again.changes) == {found}


def test_a_job_may_fix_the_options_that_were_being_tried() -> None:
    options = options_to_try(chain())
    fixed = options[-1].on(chain())
    machine = Machine(fixed, start=[options[0], options[-1]])
    assert machine.run(10) == options[-1]
