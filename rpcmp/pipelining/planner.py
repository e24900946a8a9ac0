"""Plan a job for given hosts: who serves which layers, in which order, and who stands by. Pure.

(1) for each number of stages, chains of hosts whose slowest part is fastest     `chain_search`
(2) each simulated with the links between its hosts: the time of a step          `cost_model`
(3) with what a message costs, if steps of one of them were rehearsed            `calibration`
(4) the fastest few also under the other schedule options that the run may try   `setting_grid`
(5) the fastest that differ in who takes part, with what losing each host costs

The hosts that are left become spares, first those that can take over most stages.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.config.types import format_size
from rpcmp.errors import ConfigError
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import Calibration, MeasuredSteps
from rpcmp.pipelining.chain_cuts import FORBIDDEN, NANOSECONDS, UNLIMITED, Chain, HostCosts
from rpcmp.pipelining.chain_search import ChainSearch
from rpcmp.pipelining.partition import StageHost, bounds
from rpcmp.pipelining.plan import (
    Connection,
    Constraints,
    Loss,
    Pair,
    Plan,
    PlanHost,
    PlannedLink,
    PlannedStage,
)
from rpcmp.pipelining.setting_grid import options_to_try
from rpcmp.pipelining.simulation import Wire

NUM_PLANS = 3
SIMULATED = 4
"""Chains of different lengths that are simulated under all schedule options."""

NUM_NEAR = 2
"""Chains of which also those are considered that do without one of their hosts."""

LINK_WEIGHTS = (1, 4)
"""What a second on the wire counts: in the second search four, since a link that is as busy as the
hosts is no slower part of a step, and yet what it carries arrives late."""

MOST_SIMULATED = 64
"""Micro-batches of a step that are simulated, if twice the number of stages is not more."""

NUM_REPLACED = 2
"""Fastest hosts that are left, which are tried in the place of one that is lost."""

ALIKE = 1.02
"""Steps that differ by less count as equal; then the plan with fewer stages comes first."""


def with_hosts(
    config: Config, settings: StageConfig, addresses: Sequence[str], balance: Sequence[int]
) -> Config:
    """Return the job with a stage on each of these hosts, all with the same settings."""
    if config.model is None:
        raise ConfigError("only a job with [model] can be planned: its stages are its layers")
    model = config.model.model_copy(update={"balance": list(balance), "num_stages": None})
    stages = [settings.model_copy(update={"addresses": [address]}) for address in addresses]
    return config.model_copy(update={"model": model, "stages": stages})


class Planner:
    """Plans one job.

    Args:
        config: with the number of micro-batches that a full mini-batch has.
        settings: of every stage; without addresses.
        links: from each host to each other; those that are missing take no time.

    Attributes:
        message_s: what a message costs each stage besides; see `calibrate`.
        loading_s: seconds for the samples of a step, whichever the plan.
    """

    def __init__(
        self,
        config: Config,
        settings: StageConfig,
        hosts: Sequence[PlanHost],
        links: Mapping[Pair, Connection],
        constraints: Constraints | None = None,
    ) -> None:
        self._config, self._settings = config, settings
        self._links = links
        self._constraints = constraints or Constraints()
        self.message_s = self.loading_s = 0.0
        self._held: dict[int, dict[str, int]] = {}
        self._use(hosts)

    def _use(self, hosts: Sequence[PlanHost]) -> None:
        """Plan for these hosts from now on."""
        self._hosts = hosts
        self._steps: dict[Hashable, float] = {}
        self.__dict__.pop("_chains", None)
        count, recompute = self._config.num_microbatches, self._settings.recompute
        self._costs = [
            HostCosts(host.profile, host.limit_bytes, count, recompute) for host in hosts
        ]
        required = (i for i, h in enumerate(hosts) if h.address in self._constraints.required)
        members = frozenset(required)
        self._search, *self._others = (
            ChainSearch(self._costs, partial(self._transfer, weight), self._most_held, members)
            for weight in LINK_WEIGHTS
        )

    def to_rehearse(self, most_s: float) -> tuple[Config, Chain] | None:
        """Return the shortest chain of several stages whose steps take no longer, as a job."""
        for chain in self._chains:
            if len(chain.hosts) > 1 and self._step_seconds(chain) <= most_s:
                addresses = [self._hosts[host].address for host in chain.hosts]
                return with_hosts(self._config, self._settings, addresses, chain.balance), chain
        return None

    @property
    def has_several_stages(self) -> bool:
        """Whether any chain has messages."""
        return any(len(chain.hosts) > 1 for chain in self._chains)

    def calibrate(self, chain: Chain, measured: MeasuredSteps) -> None:
        """Learn from steps of a chain what a message costs besides the wire, and loading.

        Also how much longer than by themselves layers take in a run, where caches are cold and a
        host's relay uses its processor too. Hosts beside the chain are taken to be like its own.
        """
        config = self._config_for(len(chain.hosts))
        wires = self._wires(chain, config.stage_names)
        known = Calibration.fit(config, measured, wires)
        self.message_s, self.loading_s = known.message_s, known.loading_s
        alone = (
            self._costs[host].ns(*part) / NANOSECONDS
            for host, part in zip(chain.hosts, bounds(chain.balance), strict=True)
        )
        busy = (sum(measured.busy[name].values()) for name in config.stage_names)
        longer = [there / max(here, 1e-9) for there, here in zip(busy, alone, strict=True)]
        of_chain = dict(zip(chain.hosts, longer, strict=True))
        others = statistics.median(longer)
        self._use(
            [
                replace(host, profile=host.profile.scaled(of_chain.get(number, others)))
                for number, host in enumerate(self._hosts)
            ]
        )

    @cached_property
    def _chains(self) -> list[Chain]:
        """The fastest chain for each number of stages for which one fits."""
        found = []
        for number in self._search.nums_stages:
            chains = [search.best(number) for search in (self._search, *self._others)]
            found += self._fastest(filter(None, chains))[:1]
        return found

    def plans(self) -> list[Plan]:
        """Return the best plans that differ in who takes part, the fastest first.

        Raises:
            ConfigError: the hosts are too small for the model, however it is cut.
        """
        if not self._chains:
            raise self._too_small()
        fastest = self._fastest(self._chains)
        pairs = (
            (chain, host)
            for chain in fastest[:NUM_NEAR]
            for host in chain.hosts
            if host not in self._search.required
        )
        near = filter(None, (self._without(*pair) for pair in pairs))
        quickest = sorted(near, key=lambda chain: chain.ns)[:NUM_PLANS]
        chains = {frozenset(chain.hosts): chain for chain in (*quickest, *fastest)}
        timed = ((*self._under_best_options(chain), chain) for chain in chains.values())
        ranked = sorted(timed, key=lambda each: (each[0], len(each[-1].hosts), each[-1]))
        alike = [each for each in ranked if each[0] <= ALIKE * ranked[0][0]]
        first = min(alike, key=lambda each: len(each[-1].hosts))
        ranked.sort(key=lambda each: each is not first)
        return [self._plan(*each) for each in ranked[:NUM_PLANS]]

    def _fastest(self, chains: Iterable[Chain]) -> list[Chain]:
        """Return the fastest few under the options that the run starts with."""
        timed = ((self._step_seconds(chain), len(chain.hosts), chain) for chain in chains)
        return [chain for *_, chain in sorted(timed)[:SIMULATED]]

    def _most_held(self, num_stages: int, depth: int) -> int:
        if num_stages not in self._held:
            self._held[num_stages] = cost_model.held(self._config_for(num_stages))
        return self._held[num_stages][f"stage{num_stages - depth}"]

    def _config_for(self, num_stages: int) -> Config:
        names = [str(number) for number in range(num_stages)]
        return with_hosts(self._config, self._settings, names, [1] * num_stages)

    def _bytes(self, start: int) -> int:
        """Return the bytes of a micro-batch's activations in front of a layer, on the wire."""
        largest = max(host.profile.layers[start].input_bytes for host in self._hosts)
        return largest // 2 if self._config.wire_dtype == "bfloat16" else largest

    def _connection(self, one: int, other: int) -> Connection:
        pair = self._hosts[one].address, self._hosts[other].address
        return self._links.get(pair, Connection())

    def _transfer(self, weight: int, one: int, other: int, start: int) -> int:
        step_bytes = self._config.num_microbatches * self._bytes(start)
        pair = frozenset((self._hosts[one].address, self._hosts[other].address))
        if 2 * step_bytes > self._constraints.budgets.get(pair, UNLIMITED):
            return FORBIDDEN
        seconds = step_bytes / self._connection(one, other).bytes_per_s
        return round(weight * NANOSECONDS * seconds)

    def _under_best_options(self, chain: Chain) -> tuple[float, ScheduleOptions]:
        config = self._config_for(len(chain.hosts))
        timed = [
            (self._step_seconds(chain, options), number, options)
            for number, options in enumerate(options_to_try(config))
            if number == 0 or self._fits(chain, options.on(config))
        ]
        step_s, _, options = min(timed, key=lambda each: each[:2])
        return step_s, options

    def _fits(self, chain: Chain, config: Config) -> bool:
        held = cost_model.held(config).values()
        parts = zip(chain.hosts, bounds(chain.balance), held, strict=True)
        return all(self._overrun(host, part, number) <= 0 for host, part, number in parts)

    def _overrun(self, host: int, part: tuple[int, int], held: int) -> int:
        limit = self._costs[host].limit_bytes
        return 0 if limit is None else self._costs[host].memory(*part, held) - limit

    def _step_seconds(self, chain: Chain, options: ScheduleOptions | None = None) -> float:
        """Return the seconds per step; of many micro-batches only the first are simulated.

        Once the pipeline is full, each further one takes as long as the one before.
        """
        key = chain.hosts, chain.balance, options
        if key not in self._steps:
            at_least = max(self.loading_s, *self._copying(chain), 0.0)
            self._steps[key] = max(self._estimated(chain, options), at_least)
        return self._steps[key]

    def _copying(self, chain: Chain) -> Iterator[float]:
        """Yield the seconds per step in which each host sends the next one what it must.

        That is the last step's snapshot, which its neighbour holds, beside the activations. A stage
        writes no other one before it has arrived, so a step cannot be shorter.
        """
        recovery, count = self._config.recovery, len(chain.hosts)
        if not (recovery.enabled and recovery.mirror_every_steps) or count < 2:
            return
        for place, (start, end) in enumerate(bounds(chain.balance)):
            host, neighbour = chain.hosts[place], chain.hosts[(place + 1) % count]
            layers = self._hosts[host].profile.layers[start:end]
            sent = sum(layer.snapshot_bytes for layer in layers) / recovery.mirror_every_steps
            if place + 1 < count:
                sent += self._config.num_microbatches * self._bytes(end)
            yield sent / self._connection(host, neighbour).bytes_per_s

    def _estimated(self, chain: Chain, options: ScheduleOptions | None) -> float:
        config = self._config_for(len(chain.hosts))
        config = config if options is None else options.on(config)
        count, most = config.num_microbatches, max(MOST_SIMULATED, 2 * len(chain.hosts))
        if count <= most:
            return self._simulated(config, chain)
        fewer, more = (
            self._simulated(config.model_copy(update={"num_microbatches": number}), chain)
            for number in (most // 2, most)
        )
        return more + (count - most) * (more - fewer) / (most - most // 2)

    def _simulated(self, config: Config, chain: Chain) -> float:
        names = config.stage_names
        profiles = [self._hosts[host].profile for host in chain.hosts]
        hosts = [
            StageHost(name, profile, None, config.num_microbatches, 0, self._settings.recompute)
            for name, profile in zip(names, profiles, strict=True)
        ]
        updates = cost_model.updates_of(hosts, chain.balance)
        times, wires = cost_model.times_of(hosts, chain.balance), self._wires(chain, names)
        return cost_model.step_seconds(config, times, updates, self.message_s, wires)

    def _wires(self, chain: Chain, names: Sequence[str]) -> dict[Pair, Wire]:
        wires = {}
        for place, (_, end) in enumerate(bounds(chain.balance)[:-1]):
            for one, other in ((place, place + 1), (place + 1, place)):
                way = self._connection(chain.hosts[one], chain.hosts[other])
                seconds = self._bytes(end) / way.bytes_per_s
                wires[names[one], names[other]] = Wire(way.latency_s, seconds)
        return wires

    def _plan(self, step_s: float, options: ScheduleOptions, chain: Chain) -> Plan:
        held = cost_model.held(options.on(self._config_for(len(chain.hosts)))).values()
        stages = [
            PlannedStage(
                self._hosts[host].address,
                part,
                self._costs[host].ns(*part) / NANOSECONDS,
                self._costs[host].memory(*part, number),
                self._costs[host].limit_bytes,
            )
            for host, part, number in zip(chain.hosts, bounds(chain.balance), held, strict=True)
        ]
        spares = self._spares(chain)
        others = set(range(len(self._hosts))).difference(chain.hosts, spares)
        busy = sum(stage.busy_s for stage in stages)
        return Plan(
            stages,
            list(self._planned_links(chain)),
            [self._hosts[spare].address for spare in spares],
            [self._hosts[other].address for other in sorted(others)],
            options,
            step_s,
            max(0.0, 1.0 - busy / (step_s * len(stages))) if step_s else 0.0,
            [self._loss(chain, host, spares, options) for host in chain.hosts],
        )

    def _planned_links(self, chain: Chain) -> Iterator[PlannedLink]:
        parts = bounds(chain.balance)
        for one, other, (_, end) in zip(chain.hosts, chain.hosts[1:], parts, strict=False):
            yield PlannedLink(
                self._hosts[one].address,
                self._hosts[other].address,
                2 * self._config.num_microbatches * self._bytes(end),
                self._search.costs.busy(one, other)[end - 1] / NANOSECONDS,
            )

    def _spares(self, chain: Chain) -> list[int]:
        """Return the hosts that are left and can take over a stage, most versatile first."""
        can_take = {
            host: sum(self._replaced(chain, place, host) is not None for place in range(count))
            for count in [len(chain.hosts)]
            for host in range(len(self._hosts))
            if host not in chain.hosts
        }
        able = [host for host, stages in can_take.items() if stages]
        return sorted(able, key=lambda host: (-can_take[host], self._costs[host].total_ns))

    def _replaced(self, chain: Chain, place: int, spare: int) -> Chain | None:
        """Return the chain with a spare in a stage's place; None if the stage does not fit."""
        part, count = bounds(chain.balance)[place], len(chain.hosts)
        if self._overrun(spare, part, self._most_held(count, count - place)) > 0:
            return None
        hosts = (*chain.hosts[:place], spare, *chain.hosts[place + 1 :])
        ways = zip(hosts, hosts[1:], bounds(chain.balance), strict=False)
        if any(self._transfer(1, one, other, end) == FORBIDDEN for one, other, (_, end) in ways):
            return None
        return chain._replace(hosts=hosts)

    def _loss(
        self, chain: Chain, host: int, spares: Sequence[int], options: ScheduleOptions
    ) -> Loss:
        address, place = self._hosts[host].address, chain.hosts.index(host)
        for spare in spares:
            if (replaced := self._replaced(chain, place, spare)) is not None:
                return Loss(address, self._hosts[spare].address, self._again(replaced, options))
        without = self._without(chain, host)
        return Loss(address, None, None if without is None else self._again(without, options))

    def _again(self, chain: Chain, options: ScheduleOptions) -> float:
        """Return the seconds per step of another chain under these options, if they fit there."""
        fits = self._fits(chain, options.on(self._config_for(len(chain.hosts))))
        return self._step_seconds(chain, options if fits else None)

    def _without(self, chain: Chain, host: int) -> Chain | None:
        """Return the best chain near this one that does without a host."""
        place, order = chain.hosts.index(host), chain.hosts
        rest = sorted(
            set(range(len(self._hosts))).difference(order),
            key=lambda other: self._costs[other].total_ns,
        )
        others = dict.fromkeys([*self._spares(chain)[:1], *rest[:NUM_REPLACED]])
        orders: Iterable[tuple[int, ...]] = [
            *((*order[:place], other, *order[place + 1 :]) for other in others),
            *([(*order[:place], *order[place + 1 :])] if len(order) > 1 else []),
        ]
        chains = filter(None, map(self._search.cut, orders))
        return min(chains, key=lambda chain: chain.ns, default=None)

    def _too_small(self) -> ConfigError:
        if (needed := len(self._search.required)) > (num_layers := self._costs[0].num_layers):
            return ConfigError(
                f"{needed} hosts have to take part, but the model has {num_layers} layers; require "
                "fewer"
            )
        lacking = self._search.lacking()
        if lacking is None:
            return ConfigError(
                "no plan keeps to the budgets of the links with the hosts that have to take part; "
                "raise a budget, or require fewer hosts"
            )
        extra, chain = lacking
        parts, count = bounds(chain.balance), len(chain.hosts)

        def needs(place: int) -> int:
            held = self._most_held(count, count - place)
            return self._costs[chain.hosts[place]].memory(*parts[place], held)

        def missing(place: int) -> int:
            return needs(place) - (self._costs[chain.hosts[place]].limit_bytes or UNLIMITED)

        worst = max(range(count), key=missing)
        host, (start, end) = self._hosts[chain.hosts[worst]], parts[worst]
        return ConfigError(
            f"no plan fits into the memory of {len(self._hosts)} hosts: each would need "
            f"{format_size(extra)} more. In the plan that comes nearest, with balance = "
            f"{list(chain.balance)}, {host.address} needs {format_size(needs(worst))} for layers "
            f"{start} to {end - 1} and may have {format_size(host.limit_bytes or 0)}; take more "
            "hosts, smaller micro-batches, a smaller max_in_flight, or recompute = true"
        )
