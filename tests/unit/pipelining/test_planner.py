"""Plans for hosts whose speed, memory and links are known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from rpcmp.config.job_sections import StageConfig
from rpcmp.errors import ConfigError
from rpcmp.pipelining import chain_estimates
from rpcmp.pipelining.calibration import MeasuredSteps
from rpcmp.pipelining.plan import Connection
from rpcmp.pipelining.planner import Planner, Timed
from tests.support.planning import (
    hosts,
    layer,
    planned_job,
    plans,
    profile,
    served_by,
    trained_on,
)

MB = 10**6


def rehearsing(*seconds: float) -> tuple[Planner, Timed]:
    """Return a planner for hosts of these speeds, and what it wants to be rehearsed first."""
    made = Planner(planned_job(), StageConfig(), hosts(*seconds), {})
    timed = made.to_rehearse()
    assert timed is not None
    return made, timed


def both_ways(one: str, other: str, way: Connection) -> dict[tuple[str, str], Connection]:
    return {(one, other): way, (other, one): way}


def test_a_faster_host_gets_more_layers() -> None:
    best = plans(hosts(1, 3), num_microbatches=64, data={"train": "zoo:x", "batch_size": 64})[0]
    layers = dict(zip(served_by(best), best.balance, strict=True))
    assert layers == {"host0:1": 6, "host1:1": 2}
    assert [stage.busy_s for stage in best.stages] == [64 * 6, 64 * 6]
    assert 64 * 6 < best.step_s < 64 * 7  # the pipeline fills and drains once
    assert best.spares == best.unused == []


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_the_time_of_many_micro_batches_follows_from_fewer(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: dict[str, Any] = {"schedule": schedule, "max_in_flight": None, "num_microbatches": 200}
    job["data"] = {"train": "zoo:x", "batch_size": 200}
    links = both_ways("host0:1", "host1:1", Connection(0.1, MB))
    fewer = plans(hosts(1, 2, 3, received=1000), links, **job)
    monkeypatch.setattr(chain_estimates, "MOST_SIMULATED", 1000)
    everything = plans(hosts(1, 2, 3, received=1000), links, **job)
    assert [plan.step_s for plan in fewer] == pytest.approx([plan.step_s for plan in everything])


def test_the_three_plans_have_different_hosts_and_the_fastest_comes_first() -> None:
    found = plans(hosts(1, 1, 1, 1))
    assert len({frozenset(served_by(plan)) for plan in found}) == len(found) == 3
    assert [plan.step_s for plan in found] == sorted(plan.step_s for plan in found)
    for plan in found:
        everyone = {*served_by(plan), *plan.spares, *plan.unused}
        assert everyone == {f"host{number}:1" for number in range(4)}


def test_a_step_that_is_hardly_faster_takes_no_more_hosts() -> None:
    """The last host would take 1 of 8 layers at a time as slow as 8 of the first."""
    best = plans(hosts(1, 100))[0]
    assert served_by(best) == ["host0:1"]
    assert best.spares == ["host1:1"]


def test_neighbours_have_the_fast_links() -> None:
    """Only one order of these hosts has no slow link."""
    slow, fast = Connection(0.0, MB / 100), Connection(0.0, 1000 * MB)
    pairs = itertools.combinations([f"host{number}:1" for number in range(4)], 2)
    quick = [{"host2:1", "host0:1"}, {"host0:1", "host3:1"}, {"host3:1", "host1:1"}]
    links: dict[tuple[str, str], Connection] = {}
    for one, other in pairs:
        links |= both_ways(one, other, fast if {one, other} in quick else slow)
    best = plans(hosts(1, 1, 1, 1, received=MB), links)[0]
    neighbours = [set(pair) for pair in itertools.pairwise(served_by(best))]
    assert neighbours in (quick, quick[::-1])
    assert [link.step_bytes for link in best.links] == [2 * 4 * MB] * 3
    assert all(link.busy_s == pytest.approx(4 / 1000) for link in best.links)


def test_a_link_as_busy_as_the_hosts_is_avoided() -> None:
    """It would be no slower a part than they are, but what it carries arrives late."""
    links: dict[tuple[str, str], Connection] = {}
    for other in ("host1:1", "host2:1"):
        links |= both_ways("host0:1", other, Connection(0.0, MB / 4))
    found = plans(hosts(1, 1, 1, received=MB), links)
    pairs = [set(served_by(plan)) for plan in found if len(plan.stages) == 2]
    assert pairs[0] == {"host1:1", "host2:1"}


def test_a_step_lasts_until_the_snapshot_of_the_one_before_has_arrived() -> None:
    links = both_ways("host0:1", "host1:1", Connection(0.0, MB))
    layers = [layer(0.01).model_copy(update={"snapshot_bytes": MB})] * 8
    heavy = [replace(each, profile=profile(layers)) for each in hosts(1, 1)]

    def step_s(every: int) -> float:
        found = plans(heavy, links, recovery={"mirror_every_steps": every})
        both = next(plan for plan in found if len(plan.stages) == 2)
        assert both.balance == [4, 4]
        return both.step_s

    assert step_s(1) == pytest.approx(4, rel=0.01)
    assert step_s(4) == pytest.approx(1, rel=0.01)
    assert step_s(0) < 0.5  # of computing alone


def test_latency_makes_a_step_longer() -> None:
    near, far = (
        plans(hosts(1, 1), both_ways("host0:1", "host1:1", Connection(latency)))[0]
        for latency in (0.0, 1.0)
    )
    assert far.step_s >= near.step_s + 2


def test_messages_that_cost_more_than_they_bring_are_not_sent() -> None:
    """The cost is learned from steps of two stages, apart from what the link takes."""
    links = both_ways("host0:1", "host1:1", Connection(0.01))
    made = Planner(planned_job(), StageConfig(), hosts(0.01, 0.01), links)
    assert len(made.plans()[0].stages) == 2
    assert not made.plans()[0].is_rehearsed
    timed = made.to_rehearse()
    assert timed is not None
    job = made.job(timed)
    assert job.addresses == served_by(made.plans()[0])
    assert job.options == timed.options
    busy = {name: {"F": 0.08, "B": 0.04, "W": 0.04} for name in ("stage0", "stage1")}
    quick = 0.2 + 2 * 0.01  # four micro-batches, one to fill, and there and back on the wire
    made.learn(timed, MeasuredSteps(quick, 0.0, busy))
    assert made.estimates.message_s == pytest.approx(0.0, abs=1e-3)
    assert made.plans()[0].step_s == quick
    assert made.plans()[0].is_rehearsed
    assert made.plans()[0].bubble == pytest.approx(1 - 0.16 / quick)
    made.learn(timed, MeasuredSteps(quick + 1.0, 0.0, busy))
    assert made.estimates.message_s > 0.02
    assert len(made.plans()[0].stages) == 1


def test_plans_are_rehearsed_until_those_that_are_left_have_been() -> None:
    """The first host takes three times as long in a run as by itself."""
    made, truth = (
        Planner(planned_job(), StageConfig(), hosts(first, 0.011, 0.012), {})
        for first in (0.01, 0.03)
    )
    tried = list[list[str]]()
    while (timed := made.to_rehearse()) is not None:
        tried.append(made.job(timed).addresses)
        made.learn(timed, trained_on(truth, timed))
        assert len(tried) < 6
    assert "host0:1" in tried[0]
    found, best = made.plans(), truth.plans()[0]
    assert all(plan.is_rehearsed for plan in found)
    assert set(served_by(found[0])) == set(served_by(best))
    assert found[0].step_s == pytest.approx(best.step_s, rel=0.05)


def test_the_best_two_are_rehearsed_again_if_one_may_have_been_lucky() -> None:
    made, truth = (
        Planner(planned_job(), StageConfig(), hosts(0.01, 0.02, 0.04), {}) for _ in range(2)
    )
    while (timed := made.to_rehearse()) is not None:
        measured = trained_on(truth, timed)
        if len(timed.chain.hosts) == 2:
            measured = measured._replace(step_s=0.85 * measured.step_s)
        made.learn(timed, measured)
    assert [len(plan.stages) for plan in made.plans()] == [2, 3, 1]
    again = list[int]()
    while (timed := made.to_rehearse_again()) is not None:
        again.append(len(timed.chain.hosts))
        made.learn(timed, trained_on(truth, timed))
        assert len(again) < 6
    assert again == [2, 3]
    found = made.plans()
    assert [len(plan.stages) for plan in found] == [3, 2, 1]
    assert found[1].step_s == pytest.approx(0.925 * truth.plans()[1].step_s)


def test_plans_that_clearly_differ_are_not_rehearsed_again() -> None:
    made = Planner(planned_job(), StageConfig(), hosts(0.01, 0.01), {})
    while (timed := made.to_rehearse()) is not None:
        made.learn(timed, trained_on(made, timed))
    assert made.to_rehearse_again() is None


def test_a_plan_that_was_rehearsed_gives_way_to_what_is_clearly_faster() -> None:
    """Its own hosts are as fast as they were taken to be, and other cuts are alike."""
    made, timed = rehearsing(0.01, 0.01)
    first, second = ({"F": 0.04 * n} for n in timed.chain.balance)
    made.learn(timed, MeasuredSteps(timed.step_s, 0.0, {"stage0": first, "stage1": second}))
    assert made.plans()[0].balance == [4, 4]
    second = {"F": 3 * 0.04 * 4}
    made.learn(timed, MeasuredSteps(2.5 * timed.step_s, 0.0, {"stage0": first, "stage1": second}))
    again = made.to_rehearse()
    assert again is not None
    assert set(again.chain.hosts) == set(timed.chain.hosts)
    assert sorted(again.chain.balance) == [2, 6]


def test_more_hosts_do_not_help_where_loading_takes_longer_unless_fewer_have_failed() -> None:
    made, timed = rehearsing(*[0.01] * 4)
    job = made.job(timed)
    busy = {name: {"F": 0.01, "B": 0.01} for name in job.stage_names}
    made.learn(timed, MeasuredSteps(2.0, 0.9, busy))
    best = made.plans()[0]
    assert (best.step_s, len(best.stages)) == (2.0, 1)
    while (other := made.to_rehearse()) is not None:
        made.give_up(other)
    assert served_by(made.plans()[0]) == job.addresses


def test_one_host_is_rehearsed_as_well() -> None:
    alone, timed = rehearsing(1)
    alone.learn(timed, MeasuredSteps(9.0, 0.0, {"stage0": {"F": 8.0, "B": 0.5}}))
    assert alone.to_rehearse() is None
    (only,) = alone.plans()
    assert (only.step_s, only.stages[0].busy_s) == (9.0, 8.5)


def test_a_stage_that_takes_long_with_few_layers_is_not_taken_for_a_slow_host() -> None:
    """Each stage takes as long as one layer besides its own, which take as long as alone."""
    made, timed = rehearsing(0.01, 0.03)
    job = made.job(timed)
    seconds = [0.01 if address == "host0:1" else 0.03 for address in job.addresses]
    parts = zip(job.stage_names, seconds, timed.chain.balance, strict=True)
    busy = {name: {"F": 4 * (1 + count) * each} for name, each, count in parts}
    made.learn(timed, MeasuredSteps(0.5, 0.0, busy))
    assert [host.besides_s for host in made.estimates.hosts] == pytest.approx([0.04, 0.12], rel=0.4)
    for host, alone in zip(made.estimates.hosts, hosts(0.01, 0.03), strict=True):
        seconds = [each.profile.layers[0].forward_s for each in (host, alone)]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.2)


def test_hosts_may_be_equal_in_everything() -> None:
    found = plans(hosts(1, 1, 1), schedule="auto", max_in_flight="auto")
    assert len(found) == 3


def test_stages_that_are_modules_cannot_be_planned() -> None:
    job = planned_job(model=None, stages=[{"module": "zoo:Encoder"}])
    with pytest.raises(ConfigError, match=r"only a job with \[model\] can be planned"):
        Planner(job, StageConfig(), hosts(1), {}).plans()
