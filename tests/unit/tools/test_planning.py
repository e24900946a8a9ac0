"""What a plan is made for, and how its links are measured."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rpcmp.config.job_sections import StageConfig
from rpcmp.errors import ConfigError, SecurityError, UnreachableError
from rpcmp.server.client import StageClient
from rpcmp.server.link_speed import LinkSpeed
from rpcmp.tools import planning
from rpcmp.tools.planning import Wishes, rounds, stage_settings
from rpcmp.v1 import doctor_pb2
from tests.support.planning import planned_job


@pytest.mark.parametrize("count", range(1, 9))
def test_each_pair_has_its_round_and_each_server_one_link_in_it(count: int) -> None:
    found = list(rounds(count))
    for pairs in found:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
    everything = sorted(pair for pairs in found for pair in pairs)
    assert everything == [(one, other) for one in range(count) for other in range(one + 1, count)]
    assert len(found) <= count


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes(use=["a:2"]), "--use a:2: no such server is given; did you mean 'a:1'"),
        (Wishes(without=["x"]), "--without x: no such server"),
        (Wishes(memory={"b:2": 1}), "--memory b:2: no such server is given; did you mean 'b:1'"),
        (Wishes(budgets={frozenset(("a:1", "c:1")): 1}), "--link-budget c:1: no such server"),
        (Wishes(use=["a:1"], without=["a:1"]), "a:1 is to take part, and not to"),
        (Wishes(without=["a:1", "b:1"]), "--without leaves no server"),
    ],
)
def test_wishes_about_servers_that_are_not_given_are_refused(wishes: Wishes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wishes.require_known(["a:1", "b:1"])


def test_all_stages_of_a_plan_have_the_settings_that_a_configs_share() -> None:
    places: list[dict[str, Any]] = [
        {"addresses": ["a:1"], "memory": "1 GiB"},
        {"name": "last", "addresses": ["b:1"]},
    ]
    job = planned_job(stages=[{**place, "device": "auto", "threads": 2} for place in places])
    assert stage_settings(job) == StageConfig(device="auto", threads=2)
    assert stage_settings(planned_job()) == StageConfig()
    uneven = planned_job(stages=[{**place, "threads": 1 + i} for i, place in enumerate(places)])
    with pytest.raises(ConfigError, match="`threads` is not the same for all"):
        stage_settings(uneven)
    with pytest.raises(ConfigError, match=r"only a job with \[model\]"):
        stage_settings(planned_job(model=None, stages=[{"module": "zoo:Encoder"}]))


class End:
    """A server's client whose link to another one is known."""

    def __init__(self, address: str, speed: LinkSpeed | Exception) -> None:
        self.name = self.address = address
        self._speed = speed

    async def probe(self, request: doctor_pb2.ProbeRequest) -> LinkSpeed:
        assert request.address == "b:1"
        if isinstance(self._speed, Exception):
            raise self._speed
        return self._speed


def measured(speed: LinkSpeed | Exception) -> Any:
    ends = [cast(StageClient, End(address, speed)) for address in ("a:1", "b:1")]
    return asyncio.run(planning._measure_link(*ends))


def test_a_link_is_measured_from_one_end_for_both_directions() -> None:
    ways = measured(LinkSpeed(0.5, 0.0, there=10.0, back=20.0))
    assert {pair: tuple(vars(way).values()) for pair, way in ways.items()} == {
        ("a:1", "b:1"): (0.25, 10.0),
        ("b:1", "a:1"): (0.25, 20.0),
    }


@pytest.mark.parametrize("kind", [UnreachableError, SecurityError])
def test_a_link_that_is_down_is_named_by_both_ends(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"the link from a:1 to b:1 is down: refused; .*--without b:1"):
        measured(kind("refused"))
