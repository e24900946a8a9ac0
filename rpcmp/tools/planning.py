"""Plan a job for given servers, for `rpcmp plan`: measure, then see `rpcmp.pipelining.planner`.

Layers and memory are measured on every server's host, as for `balance = "auto"`; each link as
`rpcmp doctor` does, from one server to the other, as their workers' tensors would go. The links are
measured in rounds, in which each server has one:

    1-2 3-4     1-3 2-4     1-4 2-3

Then a few steps of the best plans are trained; see `rpcmp.tools.plan_rehearsals`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schema import Config
from rpcmp.config.types import format_size
from rpcmp.errors import (
    ConfigError,
    SecurityError,
    UnreachableError,
    suggest,
)
from rpcmp.job import autobalance
from rpcmp.job.server_calls import dialer_for, gather_all, server_addresses
from rpcmp.job.server_pool import connected, forks_for
from rpcmp.pipelining.chain_estimates import with_hosts
from rpcmp.pipelining.plan import Connection, Constraints, Pair, Plan, PlanHost
from rpcmp.pipelining.planner import Planner
from rpcmp.process.fork_client import Forks
from rpcmp.server.client import StageClient
from rpcmp.tools.plan_rehearsals import rehearse_best
from rpcmp.v1 import doctor_pb2

PLACES = frozenset({"name", "addresses", "replicas", "shares", "memory"})
"""Keys of a stage that a plan sets, or that mean nothing to another host."""

PROBE_SECONDS = 0.1
"""How long each link is used in each direction, at least."""


@dataclass(frozen=True)
class Wishes:
    """What the user wants of a plan, by the addresses of servers.

    Attributes:
        use, without: servers that have to take part, and that must not.
        memory: bytes that a worker may use.
        budgets: the most bytes per step between two of them, both ways together.
    """

    use: Collection[str] = ()
    without: Collection[str] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    budgets: Mapping[frozenset[str], int] = field(default_factory=dict)

    def require_known(self, addresses: Sequence[str]) -> None:
        """Check that they are about given servers, and that some are left."""
        pairs = {
            "--use": self.use,
            "--without": self.without,
            "--memory": self.memory,
            "--link-budget": [address for pair in self.budgets for address in sorted(pair)],
        }
        for option, named in pairs.items():
            for address in named:
                if address not in addresses:
                    raise ConfigError(
                        f"{option} {address}: no such server is given{suggest(address, addresses)}"
                    )
        if both := sorted(set(self.use).intersection(self.without)):
            raise ConfigError(f"{both[0]} is to take part, and not to: --use or --without")
        if set(addresses) <= set(self.without):
            raise ConfigError("--without leaves no server; give more by --connect")

    def with_limits_of(self, config: Config) -> Wishes:
        """Return these with the `memory` that a config's stages give for its own addresses."""
        sizes = (config.stage(worker.stage_index).memory_bytes for worker in config.workers)
        pairs = zip(config.addresses, sizes, strict=False)
        own = {address: size for address, size in pairs if size is not None}
        return replace(self, memory={**own, **self.memory})


@dataclass(frozen=True)
class PlanningResult:
    """The best plans, and what they were made from.

    Attributes:
        config: the job, with its module cut.
        settings: of every stage.
        links: between the hosts, each in both directions.
        notes: what the plans do not consider.
    """

    config: Config
    settings: StageConfig
    hosts: list[PlanHost]
    links: dict[Pair, Connection]
    plans: list[Plan]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return plain data; times in seconds, memory in bytes."""
        plans = [plan.as_json() for plan in self.plans]
        links = [{"from": a, "to": b, **asdict(way)} for (a, b), way in self.links.items()]
        return {"name": self.config.name, "plans": plans, "links": links, "notes": self.notes}


async def plan(config: Config, addresses: Sequence[str], wishes: Wishes) -> PlanningResult:
    """Plan a job for the servers at these addresses.

    Raises:
        ConfigError: the job cannot be planned, a server serves one stage only, or the hosts are too
            small.
        UnreachableError: a server, or a link between two, is down.
    """
    wishes.require_known(addresses)
    addresses = [address for address in addresses if address not in wishes.without]
    settings = stage_settings(config)
    recovery = config.recovery.model_copy(update={"spares": []})
    config = config.model_copy(update={"recovery": recovery, "planned_for": []})
    config = config.with_full_microbatches()
    config.require_data("planning")
    everywhere = with_hosts(config, settings, addresses, [1] * len(addresses))
    server_addresses(everywhere, addresses)  # refuses impossible ones
    async with forks_for(config, addresses) as forks:
        everywhere = await autobalance.with_cut(everywhere, addresses, forks)
        links = await _measure_links(everywhere, addresses, forks)
        hosts, machines = await _measure_hosts(everywhere, addresses, wishes.memory, forks)
        config = config.model_copy(update={"cut": everywhere.cut, "tied": everywhere.tied})
        constraints = Constraints(frozenset(wishes.use), wishes.budgets)
        planner = Planner(config, settings, hosts, links, constraints)
        notes = list(_notes(addresses, machines))
        if reason := await rehearse_best(planner, forks):
            notes.append(f"not all of these plans were tried, only predicted: {reason}")
    return PlanningResult(config, settings, hosts, links, planner.plans(), notes)


def stage_settings(config: Config) -> StageConfig:
    """Return the settings of every stage of a plan, without its place.

    Raises:
        ConfigError: the stages' settings differ; a plan has other stages.
    """
    if config.model is None:
        raise ConfigError(
            "only a job with [model] can be planned, whose layers may go anywhere; its [[stages]] "
            "are modules of their own: write their `addresses`"
        )
    if config.is_replicated:
        raise ConfigError(
            "replicas are not planned, since their number changes bits: plan the job without "
            "`replicas` and `shares`, and add them to the result"
        )
    first, *others = config.stages or [StageConfig()]
    for key in StageConfig.model_fields:
        if key not in PLACES and any(getattr(one, key) != getattr(first, key) for one in others):
            raise ConfigError(
                f"`{key}` is not the same for all [[stages]], and a plan has other stages; give "
                "them one value, or plan without it and add it to the result"
            )
    return StageConfig(**first.model_dump(exclude=set(PLACES), exclude_unset=True))


async def _measure_links(
    config: Config, addresses: Sequence[str], forks: Forks
) -> dict[Pair, Connection]:
    dialer = dialer_for(config, addresses)
    links: dict[Pair, Connection] = {}
    async with connected(config, dialer, addresses, 0, forks) as clients:
        servers = await gather_all(client.connect() for client in clients)
        for address, server in zip(addresses, servers, strict=True):
            if not server.spare:
                raise ConfigError(
                    f"{address} serves stage {server.stage_index} and no other: start it with "
                    "--spare, so that it may serve whatever is planned there"
                )
        _require_different(addresses, [(each.machine, each.supervisor_pid) for each in servers])
        for pairs in rounds(len(addresses)):
            probes = (_measure_link(clients[one], clients[other]) for one, other in pairs)
            for measured in await gather_all(probes):
                links |= measured
    return links


def _require_different(addresses: Sequence[str], servers: Sequence[Hashable]) -> None:
    by_server: dict[Hashable, str] = {}
    for address, server in zip(addresses, servers, strict=True):
        if (other := by_server.setdefault(server, address)) != address:
            raise ConfigError(f"{other} and {address} are the same server: give it once")


async def _measure_link(one: StageClient, other: StageClient) -> dict[Pair, Connection]:
    request = doctor_pb2.ProbeRequest(
        stage_name=other.name, address=other.address, seconds=PROBE_SECONDS
    )
    try:
        speed = await one.probe(request)
    except (UnreachableError, SecurityError) as error:
        raise type(error)(
            f"the link from {one.address} to {other.address} is down: {error}; mend it, or plan "
            f"with --without {one.address} or --without {other.address}"
        ) from error
    figures = (speed.latency_s, speed.there, speed.back)
    if not all(math.isfinite(figure) and figure > 0 for figure in figures):
        raise UnreachableError(
            f"{one.address} reports a latency of {speed.latency_s} s to {other.address}, and "
            f"{speed.there} and {speed.back} bytes per second, which cannot be: plan with "
            f"--without {one.address}"
        )
    return {
        (one.address, other.address): Connection(speed.latency_s / 2, speed.there),
        (other.address, one.address): Connection(speed.latency_s / 2, speed.back),
    }


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs, so that each meets each other once, and one at a time."""
    seats: list[int] = list(range(count + count % 2))  # the last one may be nobody
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        seats = [seats[0], seats[-1], *seats[1:-1]]


async def _measure_hosts(
    config: Config, addresses: Sequence[str], memory: Mapping[str, int], forks: Forks
) -> tuple[list[PlanHost], list[str]]:
    """Return the hosts, and their machines."""
    sample, _ = await autobalance.sample_of(config, addresses, forks)
    measured = await autobalance.measure(config, addresses, sample, forks)
    counts = [len(host.profile.layers) for host in measured]
    for address, count in zip(addresses, counts, strict=True):
        if count != counts[0]:
            raise ConfigError(
                f"{address} has measured {count} layers, and {addresses[0]} {counts[0]}: they have "
                "different code, or one of them is not to be trusted"
            )
    hosts = []
    for rank, (address, host) in enumerate(zip(addresses, measured, strict=True)):
        limit, wanted = autobalance.memory_limit(config, rank, measured), memory.get(address)
        if limit is not None and wanted is not None and wanted > limit:
            raise ConfigError(
                f"a worker at {address} may have {format_size(wanted)}, by --memory or CONFIG, but "
                f"its host has {format_size(limit)} for it; give it no more"
            )
        hosts.append(PlanHost(address, host.profile, limit if wanted is None else wanted))
    return hosts, [host.machine for host in measured]


def _notes(addresses: Sequence[str], machines: Iterable[str]) -> Iterator[str]:
    by_machine: dict[str, list[str]] = {}
    for address, machine in zip(addresses, machines, strict=True):
        by_machine.setdefault(machine, []).append(address)
    for together in by_machine.values():
        if len(together) > 1:
            yield (
                f"{', '.join(together)} are on one machine: each was measured while the others "
                "were idle, and their stages may slow each other down"
            )
