"""What is known about the steps of chains of hosts, before and after rehearsals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.pipelining.calibration import MeasuredSteps
from rpcmp.pipelining.chain_cuts import Chain
from rpcmp.pipelining.chain_estimates import ChainEstimates
from tests.support.planning import hosts, planned_job

OPTIONS = ScheduleOptions.of(planned_job())

CHAIN = Chain((1, 0), (4, 4), 0)


@pytest.fixture
def known() -> ChainEstimates:
    return ChainEstimates(planned_job(), StageConfig(), hosts(0.01, 0.01, 0.01), {})


def measured(step_s: float, first: float, second: float, share: float = 0.0) -> MeasuredSteps:
    return MeasuredSteps(step_s, share, {"stage0": {"F": first}, "stage1": {"F": second}})


def test_a_job_has_the_hosts_of_its_chain(known: ChainEstimates) -> None:
    job = known.job(CHAIN, OPTIONS)
    assert job.addresses == ["host1:1", "host0:1"]
    assert job.options == OPTIONS


def test_a_rehearsed_chain_takes_what_it_took(known: ChainEstimates) -> None:
    assert known.of(CHAIN) is None
    known.learn(CHAIN, OPTIONS, measured(1.25, 0.16, 0.16))
    found = known.of(CHAIN)
    assert found is not None
    assert found.busy_s == [0.16, 0.16]
    assert known.step_seconds(CHAIN, OPTIONS) == 1.25
    assert known.of(CHAIN._replace(balance=(3, 5))) is None
    assert known.step_seconds(CHAIN._replace(balance=(3, 5)), OPTIONS) > 1.0  # messages cost more


def test_hosts_are_as_slow_as_in_their_last_rehearsal_and_others_alike(
    known: ChainEstimates,
) -> None:
    def slowness() -> list[float]:
        return [host.profile.layers[0].forward_s / before for host in known.hosts]

    before = known.hosts[0].profile.layers[0].forward_s
    known.learn(CHAIN, OPTIONS, measured(1.0, 0.32, 0.16))
    assert slowness() == pytest.approx([1.0, 2.0, 1.5])
    known.learn(CHAIN._replace(hosts=(2, 0)), OPTIONS, measured(1.0, 0.48, 0.32))
    assert slowness() == pytest.approx([2.0, 2.0, 3.0])


def test_loading_is_the_least_that_any_step_takes(known: ChainEstimates) -> None:
    known.learn(CHAIN, OPTIONS, measured(2.0, 0.01, 0.01, share=0.9))
    assert known.loading_s == 2.0
    assert known.step_seconds(Chain((2,), (8,), 0), OPTIONS) == 2.0


def test_what_a_stage_takes_besides_its_layers_is_told_from_them(known: ChainEstimates) -> None:
    """Layers take 0.08 s in a run, twice as long as alone, and each stage takes 0.05 s besides."""
    before = known.hosts[0].profile.layers[0].forward_s
    known.learn(CHAIN._replace(balance=(7, 1)), OPTIONS, measured(1.0, 0.61, 0.13))
    assert [host.besides_s for host in known.hosts] == pytest.approx(3 * [0.05], rel=0.3)
    layers = [host.profile.layers[0] for host in known.hosts]
    assert [each.forward_s for each in layers] == pytest.approx(3 * [2 * before], rel=0.15)


def test_stages_of_one_size_say_nothing_of_what_they_take_besides(known: ChainEstimates) -> None:
    known.learn(CHAIN, OPTIONS, measured(1.0, 0.32, 0.16))
    assert [host.besides_s for host in known.hosts] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("first", [0.306, 0.334])
def test_noise_is_not_what_stages_take_besides(known: ChainEstimates, first: float) -> None:
    known.learn(CHAIN._replace(balance=(5, 3)), OPTIONS, measured(1.0, first, 0.192))
    assert [host.besides_s for host in known.hosts] == [0.0, 0.0, 0.0]


def test_a_small_part_that_takes_many_times_as_long_does_something_besides(
    known: ChainEstimates,
) -> None:
    """Layers take as long as alone, 0.04 s, and each stage 0.3 s besides."""
    known.learn(CHAIN._replace(balance=(7, 1)), OPTIONS, measured(1.0, 0.58, 0.34))
    assert known.hosts[0].besides_s == pytest.approx(0.3, rel=0.15)


def test_two_parts_of_one_host_tell_whether_it_is_slow(known: ChainEstimates) -> None:
    """The first host is twice as slow in a run, which looks like something besides at first."""
    known.learn(CHAIN._replace(balance=(2, 6)), OPTIONS, measured(1.0, 0.16, 0.24))
    assert known.hosts[1].besides_s > 0.02
    known.learn(CHAIN._replace(balance=(6, 2)), OPTIONS, measured(1.0, 0.48, 0.08))
    assert known.hosts[1].besides_s < 0.01
    slowness = [host.profile.layers[0].forward_s / 0.005 for host in known.hosts]
    assert slowness[1] == pytest.approx(2 * slowness[0], rel=0.1)


def test_profiles_of_zeros_are_no_division_by_zero() -> None:
    known = ChainEstimates(planned_job(), StageConfig(), hosts(0.0, 0.01, 0.01), {})
    known.learn(CHAIN._replace(hosts=(0, 1)), OPTIONS, measured(1.0, 0.0, 0.16))
    known.learn(CHAIN._replace(hosts=(0, 2)), OPTIONS, measured(1.0, 0.2, 0.16))
    assert known.step_seconds(CHAIN) > 0


def test_what_stages_take_besides_is_that_of_a_whole_step() -> None:
    """Of many micro-batches only the first are simulated."""
    many = planned_job(num_microbatches=128, data={"train": "zoo:regression", "batch_size": 256})
    known = ChainEstimates(many, StageConfig(), hosts(0.0, 0.0), {})
    known.hosts = [replace(host, besides_s=12.8) for host in known.hosts]
    options = ScheduleOptions.of(many)
    assert known.step_seconds(Chain((0, 1), (4, 4), 0), options) == pytest.approx(12.9, rel=0.02)
