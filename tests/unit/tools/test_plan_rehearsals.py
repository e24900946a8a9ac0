"""Which plans are rehearsed, how often, and what becomes of those that cannot be."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, cast

import pytest

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schema import Config
from rpcmp.errors import JobError, NonFiniteLossError
from rpcmp.pipelining.calibration import MeasuredSteps
from rpcmp.pipelining.planner import Planner, Timed
from rpcmp.process.fork_client import Forks
from rpcmp.tools import plan_rehearsals
from rpcmp.tools.plan_rehearsals import rehearse_best
from tests.support.planning import hosts, planned_job, trained_on


def planner_and_truth(*seconds: float) -> tuple[Planner, Planner]:
    """Return a planner for hosts of these speeds, and another one that knows what steps take."""
    made, truth = (Planner(planned_job(), StageConfig(), hosts(*seconds), {}) for _ in range(2))
    return made, truth


def timed_of(planner: Planner, job: Config) -> Timed:
    """Return the plan that a job was made from; the planner has to ask for it just now."""
    asked = filter(None, (planner.to_rehearse(), planner.to_rehearse_again()))
    return next(timed for timed in asked if planner.job(timed).addresses == job.addresses)


def test_a_rehearsal_that_diverges_leaves_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    async def diverge(*_: Any) -> None:
        raise NonFiniteLossError(math.inf, step=4, microbatch=2)

    monkeypatch.setattr(plan_rehearsals, "rehearse", diverge)
    planner = Planner(planned_job(), StageConfig(), hosts(0.01, 0.01), {})
    forks = cast(Forks, None)
    assert "the loss is inf" in asyncio.run(rehearse_best(planner, forks))
    assert planner.estimates.rehearsed == {}
    slow = Planner(planned_job(), StageConfig(), hosts(60, 60), {})
    assert "a step would take about 1" in asyncio.run(rehearse_best(slow, forks))


def test_rehearsals_end_when_all_plans_were_tried_or_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rehearsed(count: int) -> tuple[str, int]:
        planner, truth = planner_and_truth(*[0.01] * count)

        async def measure(job: Config, addresses: list[str], *_: Any) -> MeasuredSteps:
            assert job.addresses == addresses
            return trained_on(truth, timed_of(planner, job))

        monkeypatch.setattr(plan_rehearsals, "rehearse", measure)
        reason = asyncio.run(rehearse_best(planner, cast(Forks, None)))
        return reason, len(planner.estimates.rehearsed)

    assert rehearsed(1) == ("", 1)
    assert rehearsed(3) == ("", 3)
    monkeypatch.setattr(plan_rehearsals, "MOST_REHEARSALS", 1)
    others = "each one that was tried has shown others that may be faster"
    assert rehearsed(3) == (others, 1)
    monkeypatch.setattr(plan_rehearsals, "REHEARSING_SECONDS", -1.0)
    assert rehearsed(3) == ("those that were took -1 s", 0)


def test_a_plan_that_cannot_be_rehearsed_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, truth = planner_and_truth(*[0.01] * 3)

    async def measure(job: Config, addresses: list[str], *_: Any) -> MeasuredSteps:
        if len(addresses) == 3:
            raise JobError("a step takes 15.0 s, too long to rehearse some")
        return trained_on(truth, timed_of(planner, job))

    monkeypatch.setattr(plan_rehearsals, "rehearse", measure)
    assert len(planner.plans()[0].stages) == 3
    reason = asyncio.run(rehearse_best(planner, cast(Forks, None)))
    assert re.match(
        r"some steps of \[.*\] were rehearsed, and JobError: a step takes 15.0 s", reason
    )
    found = planner.plans()
    assert len(found[0].stages) == 2
    assert found[0].is_rehearsed


CLOSE = (0.01, 0.02, 0.04)
"""Speeds of hosts for which the best two plans are nearly equal."""


def test_the_best_two_are_rehearsed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, truth = planner_and_truth(*CLOSE)
    trained = list[tuple[str, ...]]()

    async def measure(job: Config, addresses: list[str], *_: Any) -> MeasuredSteps:
        trained.append(tuple(addresses))
        return trained_on(truth, timed_of(planner, job))

    monkeypatch.setattr(plan_rehearsals, "rehearse", measure)
    assert asyncio.run(rehearse_best(planner, cast(Forks, None))) == ""
    best = {tuple(stage.address for stage in plan.stages) for plan in planner.plans()[:2]}
    assert {each for each in trained if trained.count(each) == 2} == best
    assert max(map(trained.count, trained)) == 2


@pytest.mark.parametrize("kind", [JobError("too slow"), NonFiniteLossError(math.inf, 4, 2)])
def test_what_was_rehearsed_stands_if_it_cannot_be_once_more(
    monkeypatch: pytest.MonkeyPatch, kind: Exception
) -> None:
    planner, truth = planner_and_truth(*CLOSE)
    trained = list[list[str]]()

    async def measure(job: Config, addresses: list[str], *_: Any) -> MeasuredSteps:
        trained.append(addresses)
        if trained.count(addresses) == 2:
            raise kind
        return trained_on(truth, timed_of(planner, job))

    monkeypatch.setattr(plan_rehearsals, "rehearse", measure)
    assert asyncio.run(rehearse_best(planner, cast(Forks, None))) == ""
    assert trained.count(trained[-1]) == 2
    assert [len(plan.stages) for plan in planner.plans()] == [3, 2, 1]
    assert planner.estimates.failed == set()
