"""`rpcmp tune`: the grid, the choice and what is said, with a runner that only pretends; and once
with real processes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rpcmp import configfile
from rpcmp.bench.rounds import StoppedError
from rpcmp.cli import cli
from rpcmp.config import Config
from rpcmp.errors import ConfigError
from rpcmp.setting import Setting
from rpcmp.tune import curve, report
from rpcmp.tune.grid import Axes, Grid, grid
from rpcmp.tune.runner import SETTLE_STEPS, Measured, plain
from rpcmp.tune.sweep import Tuned, tune
from tests.processes import JobFolder, Running, poll_for, rpcmp, running

CHAIN = {
    "model": {"layers": "zoo:mlp", "num_stages": 2},
    "loss": "torch.nn:MSELoss",
    "num_microbatches": 4,
    "data": {"train": "zoo:regression", "batch_size": 16},
}


def config(**changed: Any) -> Config:
    """A chain of two stages, four micro-batches of 16 samples, 1f1b."""
    return configfile.parse({**CHAIN, **changed})


def drawn(found: Grid) -> list[str]:
    """A line for each way: its numbers of micro-batches."""
    by_way: defaultdict[str, list[int]] = defaultdict(list)
    for setting in found.settings:
        by_way[setting.way].append(setting.num_microbatches)
    return [f"{way}: {numbers}" for way, numbers in by_way.items()]


def test_the_most_in_flight_counts_a_stage_s_replicas() -> None:
    behind = config(
        stages=[{}, {"replicas": 2}], data={"train": "zoo:regression", "batch_size": 64}
    )
    most = {setting.max_in_flight for setting in grid(behind, Axes()).settings}
    assert most == {None, 6}  # three workers from the first stage to the loss, twice


def test_the_default_grid_has_both_schedules_and_two_samples_in_each_micro_batch() -> None:
    found = grid(config(), Axes())
    assert drawn(found) == [
        "1f1b: [1, 2, 4, 8]",
        "zero-bubble: [1, 2, 4, 8]",
        "zero-bubble, max_in_flight 4: [4, 8]",  # 1 and 2 have no more to keep
    ]
    assert list(found.notes()) == [
        "left out: num_microbatches 1, 2, zero-bubble, max_in_flight 4: the same as zero-bubble"
    ]
    large = config(data={"train": "zoo:regression", "batch_size": 5000})
    assert max(s.num_microbatches for s in grid(large, Axes()).settings) == 128
    single = config(data={"train": "zoo:regression", "batch_size": 1}, num_microbatches=1)
    assert {s.num_microbatches for s in grid(single, Axes()).settings} == {1}


def test_the_configs_own_setting_is_always_measured() -> None:
    own = config(num_microbatches=3, schedule="gpipe")
    found = grid(own, Axes([2], ["1f1b"]))
    assert drawn(found) == ["1f1b: [2]", "gpipe: [3]"]
    assert found.own == Setting(num_microbatches=3, schedule="gpipe")


def test_messages_are_an_axis_which_widens_what_is_in_flight() -> None:
    found = grid(config(), Axes([2, 8], ["zero-bubble"], None, [1, 4]))
    assert drawn(found) == [
        "1f1b: [4]",
        "zero-bubble: [2, 8]",
        "zero-bubble, max_in_flight 4: [8]",
        "zero-bubble, 4 a message: [2, 8]",
    ]
    assert "max_in_flight 16, 4 a message: the same" in list(found.notes())[-1]
    few = grid(config(), Axes([8], ["1f1b"], [3], [4]))
    assert list(few.notes()) == [
        "left out: num_microbatches 8, 1f1b, max_in_flight 3, 4 a message: a message has 4 "
        "micro-batches"
    ]


def test_what_makes_no_sense_is_left_out_and_said() -> None:
    axes = Axes([4, 16, 17, 4], ["1f1b", "gpipe"], [None, 2, 20])
    found = grid(config(), axes)
    assert drawn(found) == [
        "1f1b: [4, 16]",
        "1f1b, max_in_flight 20: [4, 16]",
        "gpipe: [4, 16]",
    ]
    assert list(found.notes()) == [
        "left out: num_microbatches 17, 1f1b: a mini-batch has 16 samples",
        "left out: num_microbatches 4, 16, 1f1b, max_in_flight 2: the same as 1f1b",
        "left out: num_microbatches 17, 1f1b, max_in_flight 2: a mini-batch has 16 samples",
        "left out: num_microbatches 17, 1f1b, max_in_flight 20: a mini-batch has 16 samples",
        "left out: num_microbatches 17, gpipe: a mini-batch has 16 samples",
        "left out: num_microbatches 4, 16, gpipe, max_in_flight 2: gpipe always holds all "
        "micro-batches",
        "left out: num_microbatches 17, gpipe, max_in_flight 2: a mini-batch has 16 samples",
        "left out: num_microbatches 4, 16, gpipe, max_in_flight 20: gpipe always holds all "
        "micro-batches",
        "left out: num_microbatches 17, gpipe, max_in_flight 20: a mini-batch has 16 samples",
    ]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (Axes([0]), "num_microbatches: .* greater than or equal to 1 .got 0"),
        (Axes(max_in_flight=[-1]), "max_in_flight: .* greater than or equal to 1 .got -1"),
        (Axes(schedules=["zbv"]), "no schedule 'zbv'; there are 'gpipe', '1f1b', 'zero-bubble'"),
    ],
)
def test_values_that_no_config_can_have_are_errors(axes: Axes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        grid(config(), axes)


def test_there_must_be_data() -> None:
    with pytest.raises(ConfigError, match=r"no \[data\] section"):
        grid(config(data=None), Axes())


def test_what_is_measured_is_train_steps_on_full_mini_batches() -> None:
    section = {"train": "zoo:regression", "test": "zoo:regression", "batch_size": 16}
    job = config(data=section, scheduler="torch.optim.lr_scheduler:ConstantLR", max_grad_norm=1.0)
    found = plain(job)
    assert found.data is not None
    assert (found.data.test, found.data.drop_last, found.scheduler) == (None, True, None)
    assert found.max_grad_norm == 1.0


class Pretender:
    """A runner whose steps take what `seconds` says of a setting, and of how often it was run."""

    def __init__(self, seconds: Callable[[Setting, int], float]) -> None:
        self._seconds = seconds
        self.runs: list[tuple[Setting, int]] = []
        self.now = 0.0
        self.stop: asyncio.Event | None = None
        self.stops_at = 0

    async def run(self, setting: Setting, steps: int) -> Measured:
        self.runs.append((setting, steps))
        if self.stop is not None and len(self.runs) == self.stops_at:
            self.stop.set()
            await asyncio.Event().wait()  # what is under way is ended
        step = self._seconds(setting, sum(one == setting for one, _ in self.runs))
        self.now += step * (SETTLE_STEPS + steps)
        return Measured(step, step / 2)

    @property
    def order(self) -> list[str]:
        """The settings of all runs, such as "12": 1f1b with two micro-batches."""
        return [f"{s.schedule[0]}{s.num_microbatches}" for s, _ in self.runs]


def fewer_is_faster(setting: Setting, run: int) -> float:
    """A tenth of a second a micro-batch; zero-bubble now a little more, now a little less."""
    noise = 0.99 if run % 2 else 1.02
    return setting.num_microbatches / 10 * (noise if setting.schedule == "zero-bubble" else 1.0)


def noisy(setting: Setting, run: int) -> float:
    """Equal for all, every other run slower."""
    return 0.1 + 0.01 * (run % 2)


def measure(
    seconds: Callable[[Setting, int], float],
    rounds: int = 5,
    axes: Axes | None = None,
    steps: int | None = 3,
    budget: float = math.inf,
    stops_at: int = 0,
    **changed: Any,
) -> tuple[Tuned, Pretender]:
    """Tune the chain."""
    runner, job = Pretender(seconds), config(**changed)
    swept = grid(job, axes or Axes([2, 4], ["1f1b", "zero-bubble"], [None]))
    told: list[float] = []

    async def run() -> Tuned:
        runner.stop, runner.stops_at = asyncio.Event(), stops_at
        return await tune(
            *(job, swept, runner, rounds, steps, lambda what, left: told.append(left)),
            budget=budget,
            stop=runner.stop,
            clock=lambda: runner.now,
        )

    tuned = asyncio.run(run())
    assert all(0 <= left <= budget for left in told)
    assert len(told) == len(runner.runs)
    return tuned, runner


def test_rounds_interleave_and_begin_elsewhere_and_the_choice_is_measured_again() -> None:
    tuned, runner = measure(fewer_is_faster)
    order = runner.order
    assert order[:4] == ["12", "14", "z2", "z4"]  # the warm-up
    assert order[4:20] == [
        *("12", "14", "z2", "z4"),  # of which the last is dropped
        *("14", "z2", "12"),
        *("z2", "12", "14"),
        *("12", "14", "z2"),
        *("14", "z2", "12"),
    ]
    assert order[20:] == ["12", "14", "14", "12"] * 2 + ["12", "14"]
    assert [steps for _, steps in runner.runs] == [1] * 4 + [3] * 26
    assert [len(one.measured) for one in tuned.series] == [5, 5, 5, 1]


def test_what_cannot_win_is_dropped_but_never_the_configs_own() -> None:
    axes = Axes([1, 2, 4, 8], ["1f1b", "zero-bubble"], [None])
    tuned, _ = measure(fewer_is_faster, axes=axes, num_microbatches=8)
    rounds = {f"{s.setting.schedule[0]}{s.setting.num_microbatches}": s for s in tuned.series}
    assert {name: len(one.measured) for name, one in rounds.items()} == {
        "11": 5,
        "12": 5,
        "14": 1,
        "18": 5,
        "z1": 5,
        "z2": 2,
        "z4": 1,
        "z8": 1,
    }
    remarks = [str(cell) for cell in list(report.table(tuned).columns)[-1].cells]
    assert remarks.count("dropped") == 4
    assert {one["rounds"] for one in report.as_json(tuned)["settings"]} == {1, 2, 5}


def test_what_is_as_good_as_the_best_is_not_dropped() -> None:
    tuned, _ = measure(noisy, axes=Axes([1, 2, 4, 8], ["1f1b", "zero-bubble"], [None]))
    assert {len(one.measured) for one in tuned.series} == {5}


@pytest.mark.parametrize("budget", [1.0, 10.0, 30.0, 60.0, 600.0])
def test_a_sweep_keeps_to_its_budget_and_chooses_well(budget: float) -> None:
    """24 settings, whose steps take 1 to 128 ms."""
    many = Axes(None, ["gpipe", "1f1b", "zero-bubble"], [None])
    data = {"train": "zoo:regression", "batch_size": 256}
    scale = 0.01
    tuned, runner = measure(
        lambda s, run: scale * fewer_is_faster(s, run),
        *(5, many, None, budget),
        data=data,
    )
    warm_up = sum(2 * scale * fewer_is_faster(setting, 0) for setting, _ in runner.runs[:24])
    longest = 2 * scale * 12.8 * 1.02
    assert runner.now <= max(budget, 2 * warm_up) + longest
    assert tuned.best.setting.num_microbatches == 1
    if budget >= 30:
        assert tuned.recommended.num_microbatches == 1
        assert tuned.steps == (5 if budget >= 600 else tuned.steps)


def test_a_sweep_that_is_stopped_shows_what_there_is() -> None:
    tuned, _ = measure(fewer_is_faster, stops_at=11)  # in the second round
    assert tuned.is_cut_short
    assert tuned.best.setting == Setting(num_microbatches=2, schedule="zero-bubble")
    assert (tuned.confirmed, tuned.recommended) == (None, tuned.own.setting)
    said = list(report.lines(tuned))
    assert said[0] == "stopped: this is what there was until then"
    assert said[-1].startswith("not measured once more: leave your config as it is")
    report.table(tuned)
    json.dumps(report.as_json(tuned))
    again, _ = measure(fewer_is_faster, stops_at=26)  # in the confirmation
    assert again.is_cut_short
    with pytest.raises(StoppedError):
        measure(fewer_is_faster, stops_at=3)  # in the warm-up
    with pytest.raises(StoppedError):
        measure(fewer_is_faster, stops_at=6)  # before the config's own was measured


def test_a_setting_that_is_faster_again_is_recommended() -> None:
    tuned, _ = measure(fewer_is_faster)
    assert tuned.confirmed is not None
    assert tuned.confirmed.median == 0.5
    assert (tuned.is_faster, tuned.recommended) == (True, tuned.best.setting)
    *_, options, toml, note = report.lines(tuned)
    assert (options, toml) == ("--set num_microbatches=2", "num_microbatches = 2")
    assert "dropout" in note


def test_a_difference_within_noise_changes_nothing() -> None:
    tuned, _ = measure(lambda s, run: noisy(s, run) - (s.schedule != "1f1b") * 1e-3 * (run < 7))
    assert tuned.best.setting.schedule == "zero-bubble"
    assert (tuned.is_faster, tuned.recommended) == (False, tuned.own.setting)
    assert list(report.lines(tuned))[-1].endswith("leave your config as it is")


def test_too_few_rounds_recommend_nothing() -> None:
    tuned, _ = measure(fewer_is_faster, rounds=4)
    assert tuned.recommended == tuned.own.setting
    assert list(report.lines(tuned))[-1].endswith(
        "(more --rounds, or a larger --budget, could tell)"
    )


def test_the_configs_own_setting_may_be_the_best() -> None:
    tuned, runner = measure(fewer_is_faster, num_microbatches=2)
    assert (tuned.best, tuned.confirmed, len(runner.runs)) == (tuned.own, None, 20)
    assert list(report.lines(tuned)) == ["best: 2 micro-batches, 1f1b, as your config has it"]


def test_what_to_paste_names_all_that_changes() -> None:
    own = Setting(num_microbatches=4, schedule="1f1b", max_in_flight=3)
    best = Setting(num_microbatches=4, schedule="zero-bubble", max_in_flight=8)
    assert list(report.paste(own, best)) == [
        "--set schedule=zero-bubble --set max_in_flight=8",
        'schedule = "zero-bubble"',
        "max_in_flight = 8",
    ]
    plainer = Setting(num_microbatches=4, schedule="zero-bubble")
    without = ['schedule = "zero-bubble"', "(without max_in_flight)"]
    assert list(report.paste(own, plainer)) == without  # no option takes a key out


def test_the_table_marks_the_best_and_yours_and_what_is_as_good() -> None:
    columns = {
        str(c.header): list(c.cells) for c in report.table(measure(fewer_is_faster)[0]).columns
    }
    assert columns["micro-batches"] == ["2", "4", "2", "4"]
    assert columns["samples/s"] == ["80", "40", "78", "39"]
    assert columns[""] == ["best", "yours", "within noise", "dropped"]


def test_json_has_all_that_the_table_has() -> None:
    found = json.loads(json.dumps(report.as_json(measure(fewer_is_faster)[0])))
    own = {"schedule": "1f1b", "max_in_flight": None, "microbatches_per_message": 1}
    assert found["best"] == {"num_microbatches": 2, **own}
    assert found["recommended"] == found["best"]
    assert found["own"] == {"num_microbatches": 4, **own}
    slower = [one["is_slower_than_best"] for one in found["settings"]]
    assert slower == [False, True, False, False]  # the last was dropped, and nobody knows
    first = found["settings"][0]
    assert first["samples_per_s"] == pytest.approx(16 / first["step_s"])
    assert first["spread"]["median"] == first["step_s"] == 2 * first["busiest_stage_s"]


def test_the_curve_has_a_line_with_error_bars_for_each_way(tmp_path: Path) -> None:
    tuned, _ = measure(noisy)
    axes = curve.figure(tuned).axes[0]
    _, labels = axes.get_legend_handles_labels()
    assert {"1f1b", "zero-bubble", "yours: 4 micro-batches, 1f1b"} < set(labels)
    first, *_ = axes.containers
    line, _, (bars,) = first
    assert list(line.get_xdata()) == [2, 4]
    low, high = (point[1] for point in bars.get_segments()[0])
    of = tuned.series[0].seconds
    assert 1e3 * min(of) <= low < high <= 1e3 * max(of)
    curve.write_png(tuned, tmp_path / "picture")
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write the curve"):
        curve.write_png(tuned, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--microbatches", "2,x"], "--microbatches: 'x' is no positive whole number"),
        (["--microbatches", "0"], "--microbatches: '0' is no positive whole number"),
        (["--max-in-flight", "-3"], "--max-in-flight: '-3' is no positive whole number"),
        (["--schedules", "zbv"], "no schedule 'zbv'"),
        (["--schedules", ","], "--schedules ',': give at least one value"),
        (["--png", "/nowhere/at/all.png"], "cannot write /nowhere/at/all.png"),
    ],
)
def test_bad_input_fails_before_anything_starts(
    job: JobFolder, options: list[str], said: str
) -> None:
    path = job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 2')
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(cli, ["tune", str(path), *options], catch_exceptions=False)


def test_it_measures_a_real_job(job: JobFolder, tmp_path: Path) -> None:
    path = job.config('schedule = "zero-bubble"\n[model]\nlayers = "zoo:mlp"\nnum_stages = 2')
    picture = tmp_path / "curve.png"
    sweep = ["--microbatches", "2", "--schedules", "gpipe", "--rounds", "1", "--steps", "1"]
    sweep += ["--microbatches-per-message", "1,2"]
    result = rpcmp("tune", path, *sweep, "--png", picture, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    keys = ("schedule", "num_microbatches", "microbatches_per_message")
    measured = [tuple(one[key] for key in keys) for one in found["settings"]]
    assert measured == [("gpipe", 2, 1), ("gpipe", 2, 2), ("zero-bubble", 4, 1)]
    assert all(0 < one["busiest_stage_s"] < one["step_s"] for one in found["settings"])
    assert found["recommended"] == found["own"]  # one round tells nothing
    assert picture.read_bytes().startswith(b"\x89PNG")


def said(run: Running, pattern: str) -> None:
    """Wait until it has said so on standard error."""
    poll_for(lambda: re.search(pattern, "".join(run.err)), f"a line like {pattern!r}")


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of their own; its path is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def left_in(folder: Path) -> list[str]:
    """What is there, besides the cache that torch makes for a user when it is imported."""
    names = [path.name for path in folder.iterdir()]
    return [name for name in names if not name.startswith("torchinductor_")]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_of_a_real_job_that_is_stopped_leaves_nothing_behind(
    job: JobFolder, scratch: Path, signum: signal.Signals
) -> None:
    path = job.config('[model]\nlayers = "zoo:mlp"\nnum_stages = 2')
    with running("tune", path, "--budget", "600", "--rounds", "1000", "--json") as sweep:
        said(sweep, r"job: starting, to measure \d+ settings, 10 min left")
        said(sweep, r"round (?!1 )\d+ of 1000.* left")
        os.kill(sweep.pid, signum)
        ended = sweep.wait()
    assert ended.code == 128 + signum
    found = json.loads(ended.out)
    assert found["is_cut_short"]
    assert found["recommended"] == found["own"]
    assert left_in(scratch) == []


def test_a_benchmark_that_is_stopped_shows_what_there_is(scratch: Path) -> None:
    few = ("--peers", "torch-1f1b", "--pairs", "1000", "--steps", "1", "--budget", "600")
    with running("bench", "overhead", *few, "--json") as run:
        said(run, r"overhead: starting rpcmp \(1 of 2\), 10 min left")
        said(run, r"round (?!1 )\d+ of 1000.* left")
        os.kill(run.pid, signal.SIGTERM)
        ended = run.wait()
    assert ended.code == 128 + signal.SIGTERM
    assert left_in(scratch) == []
