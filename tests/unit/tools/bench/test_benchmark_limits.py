"""Budgets, stops and the time left, in an event loop whose clock jumps instead of waiting."""

from __future__ import annotations

import asyncio
import math

import pytest

from rpcmp.cli import progress_output
from rpcmp.tools.bench import benchmark, cases
from rpcmp.tools.bench.benchmark import BenchmarkResult, ComparisonRounds
from rpcmp.tools.bench.contestants import TimedSegment
from rpcmp.tools.measurement import OverBudgetError, StoppedError, TimeLimits
from tests.support.contestants import Pretender
from tests.support.pretendedtime import in_pretended_time

pytestmark = pytest.mark.usefixtures("quiet")


class Working(Pretender):
    """A contestant that sleeps for `starting` seconds at its start, and during each step."""

    starting = 0.0

    async def start(self) -> None:
        await asyncio.sleep(self.starting)
        await super().start()

    async def run(self, steps: int) -> TimedSegment:
        segment = await super().run(steps)
        await asyncio.sleep(segment.seconds_per_step * steps)
        return segment


class Steady(Working):
    """A contestant with a constant speed."""

    async def run(self, steps: int) -> TimedSegment:
        self._segments = 0
        return await super().run(steps)


def compare(
    *contestants: Pretender, budget: float, pairs: int = 9, steps: int | None = None
) -> tuple[ComparisonRounds, float, list[tuple[str, float, float]]]:
    """Return the rounds, their duration, and the progress reports: text, time, seconds left."""
    reported: list[tuple[str, float, float]] = []

    async def run() -> ComparisonRounds:
        def report(what: str, left: float) -> None:
            reported.append((what, asyncio.get_running_loop().time(), left))

        return await benchmark.compare(contestants, pairs, steps, report, TimeLimits(budget))

    return *in_pretended_time(run()), reported


def measure(*contestants: Pretender, budget: float = math.inf, pairs: int = 9) -> BenchmarkResult:
    """Return the result of a benchmark of the first case."""

    async def run() -> BenchmarkResult:
        limits = TimeLimits(budget)
        return await benchmark.benchmark(
            cases.load("sleep"), contestants, pairs, 2, lambda what, left: None, limits
        )

    return in_pretended_time(run())[0]


@pytest.mark.parametrize("budget", [2.0, 20.0, 60.0, 600.0])
@pytest.mark.parametrize("steps", [None, 3])
def test_rounds_keep_to_their_budget(budget: float, steps: int | None) -> None:
    both = Steady("a", [], 1.0), Steady("b", [], 0.5)
    done, took, _ = compare(*both, budget=budget, steps=steps)
    least = 1.5 * (1 + done.steps)  # the warm-up has one step each; then one round
    assert took <= max(budget, least)
    count = len(done.times[0].seconds)
    assert 1 <= count <= 9
    assert count == 9 or took + 1.5 * done.steps > budget


def test_a_round_cut_off_by_the_budget_does_not_count() -> None:
    slower_and_slower = Working("a", []), Working("b", [])
    done, took, _ = compare(*slower_and_slower, budget=30.0, steps=1)
    assert took == 30.0
    assert [one.seconds for one in done.times] == [[1.0, 2.0, 3.0, 4.0]] * 2
    assert benchmark.loss_difference(done.times) is None


def test_the_start_time_is_predicted_from_earlier_starts() -> None:
    contestants = [Steady(name, [], 0.1) for name in "abcd"]
    for one in contestants:
        one.starting = 8.0
    done, took, reported = compare(*contestants, budget=20.0)
    assert [len(one.seconds) for one in done.times] == [1] * 4
    assert took == pytest.approx(4 * 8.0 + 2 * 0.4)  # the warm-up has one step each; then one round
    assert [left for _, _, left in reported[:4]] == [20.0, 24.0, 16.0, 8.0]


def test_the_predicted_time_of_rounds_is_right() -> None:
    _, took, reported = compare(Steady("a", [], 0.02), Steady("b", [], 0.03), budget=60.0)
    known = reported[4:]  # after the start and first step of both
    assert known[0][0] == "warm-up: a"
    assert took < 60
    assert [now + left for _, now, left in known] == pytest.approx([took] * len(known))


def test_a_result_notes_too_few_rounds() -> None:
    def notes(pairs: int, budget: float = math.inf) -> list[str]:
        return measure(Steady("a", []), Steady("b", []), pairs=pairs, budget=budget).notes

    assert notes(5) == []
    (few,) = notes(4)
    assert few.startswith("4 rounds are too few to tell contestants apart")
    (one,) = notes(9, budget=1.0)
    assert one.startswith("1 round is too few to tell contestants apart")


def test_limits_cancel_measurements_except_needed_ones() -> None:
    async def work() -> str:
        await asyncio.sleep(5)
        return "done"

    async def run() -> None:
        limits = TimeLimits(budget=3)
        assert await limits.run(work(), is_needed=True) == "done"
        assert (limits.left, limits.at_most) == (-2.0, math.inf)
        with pytest.raises(OverBudgetError):
            await limits.run(work())
        stop = asyncio.Event()
        stopped = TimeLimits(math.inf, stop)
        asyncio.get_running_loop().call_later(1, stop.set)
        with pytest.raises(StoppedError):
            await stopped.run(work(), is_needed=True)
        assert stopped.is_stopped

    assert in_pretended_time(run())[1] == 6.0


def test_progress_is_repeated_with_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def run() -> None:
        with progress_output.measuring("job") as now:
            now.progress("starting", 12.0)
            await asyncio.sleep(16)
            now.progress("warm-up: a", math.inf)
            now.progress("warm-up: b", 300.0)  # too soon for another line of this kind
        await asyncio.sleep(60)

    in_pretended_time(run())
    assert capsys.readouterr().err.splitlines() == [
        "job: starting, about 12 s left",
        "job: starting, about 7 s left",
        "job: starting, about 2 s left",
        "job: starting, longer than expected",
        "job: warm-up: a, time left not known yet",
    ]
