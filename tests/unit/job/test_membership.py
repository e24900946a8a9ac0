"""The stages that a run goes on with when hosts join or leave: names, numbers, places, layers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.errors import ConfigError
from rpcmp.job import membership
from rpcmp.job.cuts import with_stages
from rpcmp.job.membership import Membership, even
from rpcmp.job.moving_balance import MovingBalance
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events import Event, ScheduleEvent, WarningEvent
from rpcmp.pipelining.rebalancing import BalanceWatch
from rpcmp.process.fork_client import Forks
from tests.support.profiles import host, layer

JOB: dict[str, Any] = {
    "loss": "torch.nn:MSELoss",
    "model": {"layers": "m:layers", "balance": [3, 2, 1]},
    "rebalance": "auto",
}
ADDRESSES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
NEW = "127.0.0.1:9"


class Run:
    """A run of three stages that trains."""

    def __init__(self, **more: Any) -> None:
        config = parse_config({**JOB, **more})
        self.events: list[Event] = []
        no_forks = cast(Forks, SimpleNamespace())
        self.pool = ServerPool(config, ADDRESSES[: config.num_stages], forks=no_forks)
        self.balance = MovingBalance(config, self.events.append)
        self.membership = Membership(self.balance, self.pool, self.events.append)
        layers = {name: ["x"] * 2 for name in config.stage_names}
        self.balance.start(layers, 1.0)

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, WarningEvent)]

    def join(self, *addresses: str) -> None:
        """Let hosts join that nobody has examined."""
        self.membership._newcomers.update(dict.fromkeys(addresses))

    def examine(self, address: str) -> None:
        self.membership.requests.append(address)
        asyncio.run(self.membership.examine(address))
        assert self.membership.requests == []


def test_a_new_stage_stands_before_the_last_under_a_number_that_none_had() -> None:
    run = Run()
    run.join(NEW, "127.0.0.1:10")
    change = run.membership.with_newcomers()
    assert change is not None
    assert change.config.stage_names == ["stage0", "stage1", "stage3", "stage4", "stage2"]
    assert change.config.model is not None
    assert change.config.model.balance == [2, 1, 1, 1, 1]
    assert change.joined == [NEW, "127.0.0.1:10"]
    assert "127.0.0.1:9 as stage 'stage3', 127.0.0.1:10 as stage 'stage4' have" in change.reason
    run.pool.use(change.config)
    assert [place.stage_index for place in run.pool.places] == [0, 1, 3, 4, 2]
    assert run.pool.addresses[2] == NEW
    run.membership.forget(change.joined)
    assert run.membership.with_newcomers() is None


@pytest.mark.parametrize("measured", [True, False])
def test_a_host_is_measured_if_those_of_the_run_were(
    monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    run, spare = Run(), SimpleNamespace(spare=True, job="", draining=False)
    asked: list[list[str]] = []

    async def describe(client: object) -> SimpleNamespace:
        return spare

    async def stage_hosts(config: object, addresses: list[str], forks: Forks) -> list[Any]:
        asked.append(addresses)
        return ["measured"]

    monkeypatch.setattr(membership, "describe", describe)
    monkeypatch.setattr(membership, "stage_hosts", stage_hosts)
    monkeypatch.setattr(run.balance, "are_hosts_measured", measured)
    run.examine(NEW)
    assert run.warnings == []
    found: dict[str, Any] = {**run.membership._newcomers}
    assert found == {NEW: "measured" if measured else None}
    assert asked == ([[NEW]] if measured else [])


def test_a_number_is_not_given_again_when_its_host_has_left() -> None:
    run = Run()
    run.pool.use(with_stages(run.balance.config, {"stage0": 6}))
    run.join(NEW)
    change = run.membership.with_newcomers()
    assert change is not None
    assert "stage3" in change.config.stage_names


def test_there_are_no_more_stages_than_layers() -> None:
    run = Run()
    run.join(*(f"127.0.0.1:{port}" for port in range(20, 24)))
    change = run.membership.with_newcomers()
    assert change is not None
    assert change.config.num_stages == 6
    (text,) = run.warnings
    assert "each stage has but one layer already" in text


def test_a_host_that_is_too_small_for_any_layer_is_refused_alone() -> None:
    run = Run()
    layers = [layer(0.01, state=100) for _ in range(6)]
    hosts = [host(layers, index) for index in range(3)]
    run.balance._watch = BalanceWatch(run.balance.config, hosts)
    small = host(layers, 3, limit=50)
    run.membership._newcomers.update({NEW: small, "127.0.0.1:10": hosts[0]})
    change = run.membership.with_newcomers()
    assert change is not None
    assert change.joined == ["127.0.0.1:10"]
    (text,) = run.warnings
    assert text.startswith(f"{NEW} cannot join the run: ")
    assert NEW not in [place.address for place in run.pool.known_places.values()]


@pytest.mark.parametrize(("limit", "fits"), [(1000, True), (450, False), (200, None)])
def test_layers_fit_under_the_options_of_the_run_or_the_config_s_own(
    limit: int, fits: bool | None
) -> None:
    """One host has to take over all, of which it holds two micro-batches a message, or one."""
    run = Run(schedule="1f1b", model={"layers": "m:layers", "balance": [3, 3]})
    layers = [layer(0.01, activations=60) for _ in range(6)]
    hosts = [host(layers, index, limit=limit) for index in range(2)]
    run.balance._watch = BalanceWatch(run.balance.config, hosts)
    run.balance.add(
        ScheduleEvent(step=3, chosen="", schedule="1f1b", microbatches_per_message=2, measured={})
    )
    if fits is None:
        with pytest.raises(ConfigError, match="no balance fits into memory"):
            run.membership.without(["stage1"])
    else:
        assert run.membership.without(["stage1"]).fits_options == fits


def test_a_host_with_which_the_run_could_not_go_on_is_not_asked_again_at_once() -> None:
    run = Run()
    run.join(NEW)
    assert run.membership.with_newcomers() is not None
    run.membership.forget([NEW])
    run.membership.undone(["stage3"])
    run.examine(NEW)
    assert "it has just failed to" in run.warnings[0]


def test_a_run_that_has_failed_without_a_stage_does_not_try_again() -> None:
    run = Run()
    run.balance.failed.append(frozenset({"stage1", "stage2"}))
    assert not run.membership.can_do_without(["stage0"])
    assert run.membership.can_do_without(["stage1"])


def test_the_others_take_over_from_a_host_that_leaves() -> None:
    change = Run().membership.without(["stage0"])
    assert change.config.stage_names == ["stage1", "stage2"]
    assert change.is_forced
    assert change.reason == "stage 'stage0' at 127.0.0.1:1 has left"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"rebalance": "off"}, "needs rebalance"),
        ({"recovery": {"mirror_every_steps": 0}}, "its snapshots are nowhere else"),
        ({"model": {"layers": "m:layers", "balance": [6]}}, "there is no other stage"),
    ],
)
def test_a_run_cannot_do_without_a_stage_and_says_why_once(more: dict[str, Any], why: str) -> None:
    run = Run(**more)
    assert not run.membership.can_do_without(["stage0"])
    assert not run.membership.can_do_without(["stage0"])
    assert len(run.warnings) == (0 if "rebalance" in more else 1)
    if run.warnings:
        assert why in run.warnings[0]
    else:
        with pytest.raises(ConfigError, match=why):
            asyncio.run(run.membership._examine(NEW))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (ADDRESSES[0], "it serves a stage of it already"),
        ("10.0.0.9:1", "is not a loopback address"),
        ("127.0.0.1:9", "no server answers there"),
    ],
)
def test_a_host_that_cannot_join_is_named(address: str, why: str) -> None:
    run = Run()
    run.examine(address)
    (text,) = run.warnings
    assert text.startswith(f"{address} cannot join the run: ")
    assert why in text
    assert run.membership.with_newcomers() is None


def test_layers_are_spread_evenly_where_no_host_is_known() -> None:
    assert even(["a", "b", "c"], 8) == {"a": 3, "b": 3, "c": 2}
