"""Interleaved rounds of fake contestants, and the notes and tables about their results."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from rpcmp.cli import bench, cli
from rpcmp.errors import JobError, MismatchError, UnsupportedJobError
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.tools.bench import benchmark, cases, contestants
from rpcmp.tools.bench.benchmark import BenchmarkResult, ComparisonRounds, fill_then_no_bubble
from rpcmp.tools.bench.cases import Case
from rpcmp.tools.bench.contestants import Contestant, TimedSegment
from rpcmp.tools.measurement import TimeLimits
from tests.support.contestants import Pretender, compare

pytestmark = pytest.mark.usefixtures("quiet")


class Broken(Pretender):
    """A contestant whose run fails."""

    async def run(self, steps: int) -> TimedSegment:
        raise JobError("broken")


def measure(case: Case, *contestants: Contestant) -> BenchmarkResult:
    async def run() -> BenchmarkResult:
        limits = TimeLimits()
        return await benchmark.benchmark(case, contestants, 5, 2, lambda what, left: None, limits)

    return asyncio.run(run())


def test_every_round_runs_all_contestants_once_and_starts_with_another() -> None:
    log: list[str] = []
    done = compare(Pretender("a", log), Pretender("b", log), Pretender("c", log))
    turns = "".join(line.removeprefix("run ") for line in log if line.startswith("run "))
    assert [turns[i : i + 3] for i in range(0, 15, 3)] == ["abc", "abc", "bca", "cab", "abc"]
    assert [one.seconds for one in done.times] == [[2.0, 3.0, 4.0]] * 3  # without the warm-up
    assert [len(one.losses) for one in done.times] == [benchmark.WARMUP_STEPS + 3 * 2] * 3
    assert log[-3:] == ["close c", "close b", "close a"]


def test_an_unsupported_contestant_is_closed_before_the_others_run() -> None:
    log: list[str] = []
    done = compare(Pretender("a", log), Pretender("b", log, why="no chain"))
    assert [one.name for one in done.times] == ["a"]
    assert done.unsupported == {"b": "no chain"}
    assert log.index("close b") < log.index("run a")


def test_a_failing_contestant_ends_the_benchmark_and_closes_all() -> None:
    log: list[str] = []
    with pytest.raises(JobError, match="broken"):
        compare(Pretender("a", log), Broken("b", log))
    assert log[-2:] == ["close b", "close a"]


def test_different_losses_name_the_contestant_and_the_step() -> None:
    log: list[str] = []
    case = cases.load("sleep")
    message = r"step 1: loss 1\.0 of rpcmp, 1\.001 of torch"
    with pytest.raises(MismatchError, match=message):
        measure(case, Pretender("rpcmp", log), Pretender("torch", log, drift=1e-3))
    own = replace(case, is_frozen=False)
    result = measure(own, Pretender("rpcmp", log), Pretender("torch", log, drift=1e-3))
    assert len(result.notes) == 1
    assert "step 1" in result.notes[0]
    last_bits = Pretender("torch", log, drift=1e-6)
    assert measure(case, Pretender("rpcmp", log), last_bits).notes == []


class PretendedMeter:
    """Has each contestant take as many CPU seconds per segment as the number of its process."""

    read_without: dict[int, list[int]]

    def __init__(self) -> None:
        self._total, PretendedMeter.read_without = 0.0, {}

    def read(self, roots: Iterable[int], without: Iterable[int] = ()) -> float:
        (root,) = roots
        if without:
            PretendedMeter.read_without[root] = [*without]
            self._total += root
        return self._total


def test_each_contestant_is_charged_for_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "CpuMeter", PretendedMeter)
    names = {"rpcmp": 6, "a": 2, "b": 3}
    contestants = [Pretender(name, []) for name in names]
    for one in contestants:
        one.pids = [names[one.name]]
    result = measure(cases.load("sleep"), *contestants)
    assert PretendedMeter.read_without == {6: [2, 3], 2: [6, 3], 3: [6, 2]}
    found = result.as_json()
    assert found["cpu_s"] == 3.0  # for each of a segment's two steps
    assert found["peers_cpu_s"] == {"a": 1.0, "b": 1.5}
    assert {name: ratio["median"] for name, ratio in found["cpu_ratios"].items()} == {
        "a": 3.0,
        "b": 2.0,
    }


def test_a_result_notes_that_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "disturbance", lambda before, after: "not quiet")
    both = Pretender("rpcmp", []), Pretender("torch", [])
    assert measure(cases.load("sleep"), *both).notes == ["not quiet"]


def test_a_job_that_rpcmp_does_not_support_is_an_error() -> None:
    with pytest.raises(UnsupportedJobError, match="rpcmp: no chain"):
        measure(cases.load("sleep"), Pretender("rpcmp", [], why="no chain"), Pretender("b", []))


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the contestants of the command, and the measurement of stages."""

    async def pretended(case: Case) -> list[ActionTimes]:
        return [case.nominal or ActionTimes(1.0, 1.0, 1.0)] * case.config.num_stages

    monkeypatch.setattr(benchmark, "stage_times", pretended)

    def create(name: str, seconds: float, why: str = "") -> Callable[[Case], Contestant]:
        return lambda case: Pretender(name, [], seconds, why=why)

    monkeypatch.setattr(
        contestants,
        "CONTESTANTS",
        {
            contestants.OwnPipeline.name: create("rpcmp", 0.3),
            "torch-1f1b": create("torch-1f1b", 0.4),
            "torch-best": create("torch-best", 0.1, why="too few micro-batches"),
        },
    )


def test_json_is_one_object_per_case_with_documented_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    arguments = ["bench", "sleep", "overhead", "--stages", "8", "--pairs", "5", "--json"]
    out = CliRunner().invoke(cli, arguments, catch_exceptions=False).stdout
    first, second = map(json.loads, out.splitlines())
    promised = {
        "case": "sleep",
        "num_stages": 8,
        "num_microbatches": 16,
        "step_s": pytest.approx(0.3 * 4),
        "bound_s": pytest.approx(0.550),
        "peers": {"torch-1f1b": pytest.approx(0.4 * 4)},
        "cpu_s": 0.0,  # pretenders have no processes
        "peers_cpu_s": {"torch-1f1b": 0.0},
        "cpu_ratios": {},
        "pairs": 5,
    }
    assert {key: first[key] for key in promised} == promised
    assert first["ratios"]["torch-1f1b"] == {
        "median": pytest.approx(0.75),
        "low": pytest.approx(0.75),
        "high": pytest.approx(0.75),
        "confidence": 0.9375,
    }
    assert first["ratios"]["bound"]["median"] == pytest.approx(1.2 / 0.550)
    assert first["settings"]["rpcmp"] == {"max_in_flight": 5}
    assert first["notes"] == ["without torch-best: too few micro-batches"]
    assert second["case"] == "overhead"


def test_several_cases_give_a_table_each(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    arguments = ["bench", "overhead", "transformer", "activations"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    out = result.stdout
    assert len(re.findall(r"stage times, about 60 s left", result.stderr)) == 3  # by default
    assert re.findall(r"(?m)^(\w+): \d+ stages,", out) == arguments[1:]
    for peer in ("torch-1f1b", "bound"):
        assert len(re.findall(rf"(?m)^ {peer} ", out)) == 3


def test_the_table_has_contestants_times_and_intervals() -> None:
    log: list[str] = []
    result = measure(
        cases.load("sleep"), Pretender("rpcmp", log, 0.3), Pretender("torch", log, 0.4)
    )
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(bench.table(result))
    shown = [line.split() for line in console.export_text().splitlines()]
    assert shown[0][:5] == ["sleep:", "4", "stages,", "16", "micro-batches,"]
    assert shown[2] == ["rpcmp", "max_in_flight", "5", "1200.0", "900.0", "to", "1500.0", "0.0"]
    assert shown[3][-7:] == ["2000.0", "0.0", "0.750", "0.750", "to", "0.750", "(94%)"]
    assert shown[4][:2] == ["bound", "510.0"]


@pytest.mark.parametrize(
    ("fastest", "whole", "budget", "found"),
    [
        (0.5, 9.0, math.inf, 5),  # the minimum, if the budget allows it
        (0.001, 0.02, math.inf, 2000),
        (0.001, 0.02, 50.0, 2000),
        (0.001, 0.1, 50.0, 500),
        (1.0, 30.0, 50.0, 1),
        (1.0, 300.0, 50.0, 1),
    ],
)
def test_a_round_is_as_long_as_the_budget_allows(
    fastest: float, whole: float, budget: float, found: int
) -> None:
    assert benchmark._steps(fastest, whole, budget) == found


def test_stopped_rounds_show_the_results_so_far() -> None:
    log: list[str] = []

    async def run() -> ComparisonRounds:
        stop = asyncio.Event()

        class Stopping(Pretender):
            async def run(self, steps: int) -> TimedSegment:
                if log.count("run b") == 5:
                    stop.set()
                    await asyncio.Event().wait()
                return await super().run(steps)

        both = [Pretender("a", log), Stopping("b", log)]
        limits = TimeLimits(stop=stop)
        return await benchmark.compare(both, 9, 2, lambda what, left: None, limits)

    done = asyncio.run(run())
    assert [len(one.seconds) for one in done.times] == [3, 3]
    assert benchmark.loss_difference(done.times) is None
    assert log[-2:] == ["close b", "close a"]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "ms"), [(4, 16, 510), (8, 16, 550), (1, 3, 90)]
)
def test_the_bound_of_equal_stages_has_only_the_fill_bubble(
    num_stages: int, num_microbatches: int, ms: float
) -> None:
    stages = [ActionTimes(0.010, 0.010, 0.010)] * num_stages
    assert fill_then_no_bubble(stages, num_microbatches) * 1e3 == pytest.approx(ms)


def test_the_slowest_stage_decides_at_every_position() -> None:
    fast, slow = ActionTimes(1, 1, 1), ActionTimes(2, 2, 2)
    assert fill_then_no_bubble([slow, fast, fast], 4) == 24
    assert fill_then_no_bubble([fast, fast, slow], 4) == 26
