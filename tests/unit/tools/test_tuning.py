"""The measurements, choice and report of a sweep with a simulated runner."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.errors import ConfigError
from rpcmp.pipelining.setting_grid import SETTLE_STEPS, Axes, grid
from rpcmp.tools import tuning, tuning_report
from rpcmp.tools.measurement import StoppedError, TimeLimits
from rpcmp.tools.tuning import Measurement, Tuned, plain_training
from tests.support.pretendedtime import in_pretended_time
from tests.support.settings import chain


def test_tuning_measures_train_steps_on_full_mini_batches() -> None:
    section = {"train": "zoo:regression", "test": "zoo:regression", "batch_size": 16}
    job = chain(data=section, scheduler="torch.optim.lr_scheduler:ConstantLR", max_grad_norm=1.0)
    found = plain_training(job)
    assert found.data is not None
    assert (found.data.test, found.data.drop_last, found.scheduler) == (None, True, None)
    assert found.max_grad_norm == 1.0


class Pretender:
    """A runner whose steps take `seconds(setting, number of the setting's run)`.

    It sets `stop` and then hangs in the run with the number `stops_at`.
    """

    def __init__(self, seconds: Callable[[ScheduleOptions, int], float], stops_at: int = 0) -> None:
        self._seconds, self._stops_at = seconds, stops_at
        self.runs: list[tuple[ScheduleOptions, int]] = []
        self.stop = asyncio.Event()

    async def run(self, setting: ScheduleOptions, steps: int) -> Measurement:
        self.runs.append((setting, steps))
        if len(self.runs) == self._stops_at:
            self.stop.set()
            await asyncio.Event().wait()  # the sweep cancels this run
        step = self._seconds(setting, sum(one == setting for one, _ in self.runs))
        await asyncio.sleep(step * (SETTLE_STEPS + steps))
        return Measurement(step, step / 2)

    @property
    def order(self) -> list[str]:
        """The settings of all runs in their short form."""
        return [short(setting) for setting, _ in self.runs]


def short(setting: ScheduleOptions) -> str:
    """Return the schedule's first character and the number of micro-batches, such as "12"."""
    return f"{setting.schedule[0]}{setting.num_microbatches}"


@dataclass
class Sweep:
    """The result of a sweep, with its duration and the reported estimates of the time left."""

    tuned: Tuned
    runner: Pretender
    took: float
    estimates: list[tuple[str, float, float]]


def fewer_is_faster(setting: ScheduleOptions, run: int) -> float:
    """Return 0.1 s per micro-batch; zero-bubble alternates between 2 % more and 1 % less."""
    noise = 0.99 if run % 2 else 1.02
    return setting.num_microbatches / 10 * (noise if setting.schedule == "zero-bubble" else 1.0)


def noisy(setting: ScheduleOptions, run: int) -> float:
    """Return the same time for all settings; every other run is slower."""
    return 0.1 + 0.01 * (run % 2)


def sweep(
    seconds: Callable[[ScheduleOptions, int], float],
    rounds: int = 5,
    axes: Axes | None = None,
    steps: int | None = 3,
    budget: float = math.inf,
    stops_at: int = 0,
    starting: float = 0.0,
    **changed: Any,
) -> Sweep:
    """Tune the chain in simulated time."""
    runner, job = Pretender(seconds, stops_at), chain(**changed)
    swept = grid(job, axes or Axes([2, 4], ["1f1b", "zero-bubble"], [None]))
    reported: list[tuple[str, float, float]] = []

    async def run() -> Tuned:
        def report(what: str, left: float) -> None:
            reported.append((what, asyncio.get_running_loop().time(), left))

        limits = TimeLimits(budget, runner.stop)
        await asyncio.sleep(starting)
        measurement = tuning.Sweep(swept, runner.run, rounds, steps, report, limits)
        return await measurement.run(job)

    tuned, took = in_pretended_time(run())
    assert len(reported) == len(runner.runs)
    return Sweep(tuned, runner, took, reported)


def measure(
    seconds: Callable[[ScheduleOptions, int], float], **options: Any
) -> tuple[Tuned, Pretender]:
    """Return the result of a sweep, and its runner."""
    done = sweep(seconds, **options)
    return done.tuned, done.runner


def remarks(tuned: Tuned) -> list[str]:
    """Return the last column of the table."""
    return [str(cell) for cell in list(tuning_report.table(tuned).columns)[-1].cells]


def test_rounds_interleave_and_rotate_and_the_choice_is_measured_again() -> None:
    tuned, runner = measure(fewer_is_faster)
    order = runner.order
    assert order[:4] == ["14", "12", "z2", "z4"]  # the warm-up
    assert order[4:20] == [
        *("12", "14", "z2", "z4"),  # the last is dropped after this round
        *("14", "z2", "12"),
        *("z2", "12", "14"),
        *("12", "14", "z2"),
        *("14", "z2", "12"),
    ]
    assert order[20:] == ["12", "14", "14", "12"] * 2 + ["12", "14"]
    assert [steps for _, steps in runner.runs] == [1] * 4 + [3] * 26
    assert [len(one.measured) for one in tuned.series] == [5, 5, 5, 1]


def test_settings_that_cannot_win_are_dropped_except_the_configs_own() -> None:
    axes = Axes([1, 2, 4, 8], ["1f1b", "zero-bubble"], [None])
    tuned, _ = measure(fewer_is_faster, axes=axes, num_microbatches=8)
    assert {short(one.setting): len(one.measured) for one in tuned.series} == {
        "11": 5,
        "12": 5,
        "14": 0,  # dropped after the warm-up
        "18": 5,
        "z1": 5,
        "z2": 1,
        "z4": 0,
        "z8": 0,
    }
    assert remarks(tuned).count("dropped") == 4
    found = tuning_report.as_json(tuned)["settings"]
    assert {one["rounds"] for one in found} == {0, 1, 5}
    assert [one["is_dropped"] for one in found] == [one["rounds"] < 5 for one in found]


def test_settings_as_fast_as_the_best_are_not_dropped() -> None:
    tuned, _ = measure(noisy, axes=Axes([1, 2, 4, 8], ["1f1b", "zero-bubble"], [None]))
    assert {len(one.measured) for one in tuned.series} == {5}


@pytest.mark.parametrize("budget", [1.0, 5.0, 10.0, 30.0, 60.0, 600.0])
def test_a_sweep_keeps_its_budget_and_chooses_the_fastest_setting(budget: float) -> None:
    """There are 24 settings, whose steps take 1 to 128 ms."""
    done = sweep(
        lambda s, run: 0.01 * fewer_is_faster(s, run),
        axes=Axes(None, ["gpipe", "1f1b", "zero-bubble"], [None]),
        data={"train": "zoo:regression", "batch_size": 256},
        steps=None,
        budget=budget,
    )
    assert done.took <= budget
    if budget >= 5:
        assert done.tuned.recommended.num_microbatches == 1
    if budget >= 30:
        assert done.tuned.steps == 5


TEN = Axes([1, 2, 4, 8, 16], ["1f1b", "zero-bubble"], [None])


@pytest.mark.parametrize("steps", [None, 5])
@pytest.mark.parametrize(("budget", "count"), [(65.0, 6), (5.0, 2)])
def test_a_sweep_of_a_large_job_keeps_to_its_budget(
    steps: int | None, budget: float, count: int
) -> None:
    """A step takes five seconds; the warm-up has two steps per setting, and times one of them."""
    done = sweep(lambda s, run: 5.0, axes=TEN, steps=steps, budget=budget)
    assert done.took == count * (SETTLE_STEPS + 1) * 5.0
    assert [len(one.measured) for one in done.tuned.series] == [0] * count
    assert len(done.tuned.unmeasured) == 10 - count
    assert {"dropped"} & set(remarks(done.tuned)) == set()
    message = list(tuning_report.lines(done.tuned))
    assert sum(line.startswith("not measured: no time left: num_microbatches") for line in message)
    assert "in the warm-up alone" in done.tuned.basis
    assert len(tuning_report.as_json(done.tuned)["not_measured"]) == 10 - count


def test_the_budget_includes_the_start() -> None:
    done = sweep(lambda s, run: 1.0, axes=TEN, budget=31.0, starting=20.0)
    assert done.took == 30.0
    assert len(done.tuned.series) == 5
    late = sweep(lambda s, run: 1.0, axes=TEN, budget=30.0, starting=40.0)
    assert late.took == 44.0
    assert [short(one.setting) for one in late.tuned.series] == ["11", "14"]
    assert [left for _, _, left in late.estimates] == [math.inf, 2.0]


def test_a_measurement_stops_when_the_budget_is_spent() -> None:
    done = sweep(lambda s, run: 1.0 if s.schedule == "1f1b" else 100.0, budget=30.0)
    assert done.took == 30.0
    assert [short(one.setting) for one in done.tuned.series] == ["12", "14"]
    assert not done.tuned.is_cut_short


def test_a_small_budget_is_reserved_for_the_confirmation() -> None:
    """A step takes 0.5 s; a warm-up of all ten settings takes 10 s, as does the confirmation."""
    done = sweep(
        lambda s, run: 0.5 if s.num_microbatches > 1 else 0.25, axes=TEN, steps=None, budget=19.0
    )
    assert done.took <= 19.0
    assert done.tuned.recommended.num_microbatches == 1
    assert done.tuned.confirmed is not None
    assert done.tuned.rounds < 5


@pytest.mark.parametrize("budget", [math.inf, 60.0, 30.0])
def test_the_predicted_time_left_shrinks(budget: float) -> None:
    done = sweep(
        lambda s, run: 0.4 if short(s) == "11" else 0.5, axes=TEN, steps=None, budget=budget
    )
    ends = [now + left for _, now, left in done.estimates]
    assert ends[0] == budget  # the time of a step is not known yet
    assert ends[2:] == pytest.approx([done.took] * len(ends[2:]), rel=0.25)
    assert ends[10:] == pytest.approx([done.took] * len(ends[10:]))
    left = [left for _, _, left in done.estimates[10:]]
    assert len(left) > 10
    assert min(left) > 0


def test_a_stopped_sweep_shows_the_results_so_far() -> None:
    tuned, _ = measure(fewer_is_faster, stops_at=11)  # in the second round
    assert tuned.is_cut_short
    assert short(tuned.best.setting) == "12"  # 0.2 s in the first round; "z2" 0.204
    assert (tuned.confirmed, tuned.recommended) == (None, tuned.own.setting)
    message = list(tuning_report.lines(tuned))
    assert message[0] == "stopped: these are the results so far"
    assert message[-1].startswith("not measured once more: leave your config as it is")
    tuning_report.table(tuned)
    json.dumps(tuning_report.as_json(tuned))


@pytest.mark.parametrize("stops_at", range(3, 30))
def test_a_sweep_stopped_anywhere_knows_the_fastest_and_drops_only_losers(
    stops_at: int,
) -> None:
    def steady(setting: ScheduleOptions, run: int) -> float:
        return setting.num_microbatches / 10 + 0.001 * (setting.schedule != "1f1b")

    tuned, runner = measure(steady, stops_at=stops_at)
    assert tuned.is_cut_short
    assert short(tuned.best.setting) == "12"
    message = dict(
        zip(map(short, (one.setting for one in tuned.series)), remarks(tuned), strict=True)
    )
    assert {name for name, remark in message.items() if "dropped" in remark} <= {"z4"}
    assert (message.get("z4") == "dropped") == (
        len(runner.runs) > 4
    )  # twice as slow in the warm-up
    assert len(tuned.unmeasured) == max(0, 5 - stops_at)
    waiting = [
        line for line in tuning_report.lines(tuned) if line.startswith("not measured: stopped")
    ]
    assert bool(waiting) == bool(tuned.unmeasured)


def test_a_sweep_stopped_before_a_second_setting_compares_nothing() -> None:
    with pytest.raises(StoppedError):
        measure(fewer_is_faster, stops_at=1)
    tuned, _ = measure(fewer_is_faster, stops_at=2)
    assert list(tuning_report.lines(tuned))[-1] == (
        "only your 4 micro-batches, 1f1b was measured: nothing to compare it with"
    )


def test_a_sweep_stopped_in_the_confirmation_counts_its_rounds() -> None:
    tuned, _ = measure(fewer_is_faster, stops_at=26)
    assert tuned.is_cut_short
    assert tuned.confirmed is not None
    assert tuned.confirmed.median == 0.5
    assert list(tuning_report.lines(tuned))[-1].startswith("too few rounds to tell")


def test_a_setting_whose_speed_is_confirmed_is_recommended() -> None:
    tuned, _ = measure(fewer_is_faster)
    assert tuned.confirmed is not None
    assert tuned.confirmed.median == 0.5
    assert (tuned.is_faster, tuned.recommended) == (True, tuned.best.setting)
    *_, options, toml, note = tuning_report.lines(tuned)
    assert (options, toml) == ("--set num_microbatches=2", "num_microbatches = 2")
    assert "dropout" in note


def test_a_difference_within_noise_changes_nothing() -> None:
    tuned, _ = measure(lambda s, run: noisy(s, run) - (s.schedule != "1f1b") * 1e-3 * (run < 7))
    assert tuned.best.setting.schedule == "zero-bubble"
    assert (tuned.is_faster, tuned.recommended) == (False, tuned.own.setting)
    assert list(tuning_report.lines(tuned))[-1].endswith("leave your config as it is")


def test_too_few_rounds_recommend_nothing() -> None:
    tuned, _ = measure(fewer_is_faster, rounds=4)
    assert tuned.recommended == tuned.own.setting
    assert list(tuning_report.lines(tuned))[-1].endswith(
        "(more --rounds, or a larger --budget, could tell)"
    )


def test_the_configs_own_setting_can_be_the_best() -> None:
    tuned, runner = measure(fewer_is_faster, num_microbatches=2)
    assert (tuned.best, tuned.confirmed, len(runner.runs)) == (tuned.own, None, 19)
    assert list(tuning_report.lines(tuned)) == [
        "best: 2 micro-batches, 1f1b, as your config has it"
    ]


def test_lines_to_paste_have_every_changed_key() -> None:
    own = ScheduleOptions(num_microbatches=4, schedule="1f1b", max_in_flight=3)
    best = ScheduleOptions(num_microbatches=4, schedule="zero-bubble", max_in_flight=8)
    assert list(tuning_report.paste(own, best)) == [
        "--set schedule=zero-bubble --set max_in_flight=8",
        'schedule = "zero-bubble"',
        "max_in_flight = 8",
    ]
    plainer = ScheduleOptions(num_microbatches=4, schedule="zero-bubble")
    without = ['schedule = "zero-bubble"', "(without max_in_flight)"]
    assert list(tuning_report.paste(own, plainer)) == without  # no option removes a key


def test_the_table_marks_the_best_the_own_and_equally_fast_settings() -> None:
    columns = {
        str(c.header): list(c.cells)
        for c in tuning_report.table(measure(fewer_is_faster)[0]).columns
    }
    assert columns["micro-batches"] == ["2", "4", "2", "4"]
    assert columns["samples/s"] == ["80", "40", "78", "39"]
    assert columns[""] == ["best", "yours", "within noise", "dropped"]


def test_json_has_everything_in_the_table() -> None:
    found = json.loads(json.dumps(tuning_report.as_json(measure(fewer_is_faster)[0])))
    own = {"schedule": "1f1b", "max_in_flight": None, "microbatches_per_message": 1}
    assert found["best"] == {"num_microbatches": 2, **own}
    assert found["recommended"] == found["best"]
    assert found["own"] == {"num_microbatches": 4, **own}
    slower = [one["is_slower_than_best"] for one in found["settings"]]
    assert slower == [False, True, False, False]  # the last was dropped early
    first = found["settings"][0]
    assert first["samples_per_s"] == pytest.approx(16 / first["step_s"])
    assert first["spread"]["median"] == first["step_s"] == 2 * first["busiest_stage_s"]


def test_the_curve_has_a_line_with_error_bars_per_combination(tmp_path: Path) -> None:
    tuned, _ = measure(noisy)
    axes = tuning_report.draw(tuned).axes[0]
    _, labels = axes.get_legend_handles_labels()
    assert {"1f1b", "zero-bubble", "yours: 4 micro-batches, 1f1b"} < set(labels)
    first, *_ = axes.containers
    line, _, (bars,) = first
    assert list(line.get_xdata()) == [2, 4]
    low, high = (point[1] for point in bars.get_segments()[0])
    of = tuned.series[0].seconds
    assert 1e3 * min(of) <= low < high <= 1e3 * max(of)
    tuning_report.write_png(tuned, tmp_path / "picture")
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write the curve"):
        tuning_report.write_png(tuned, tmp_path)
