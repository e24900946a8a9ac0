"""Plan a job for given hosts: who serves which layers, in which order, and who stands by. Pure.

(1) for each number of stages, chains of hosts whose slowest part is fastest     `chain_search`
(2) each simulated with the links between its hosts: the time of a step     `chain_estimates`
(3) the fastest few also under the other schedule options                   `setting_grid`
(4) the fastest that differ in who takes part, with what losing each host costs

The caller rehearses the plans, the best one first: what their steps teach may make others the best,
until those that are left have been tried, the best two twice if they are nearly equal. The hosts
that are left become spares, first those that can take over most stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.config.types import format_size
from rpcmp.errors import ConfigError
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import NOTABLE, MeasuredSteps
from rpcmp.pipelining.chain_cuts import FORBIDDEN, NANOSECONDS, UNLIMITED, Chain, HostCosts
from rpcmp.pipelining.chain_estimates import ChainEstimates
from rpcmp.pipelining.chain_search import ChainSearch
from rpcmp.pipelining.partition import bounds
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

NUM_PLANS = 3

SIMULATED = 4
"""Chains of different lengths that are simulated under all schedule options."""

NUM_NEAR = 2
"""Chains of which also those are considered that do without one of their hosts."""

LINK_WEIGHTS = (1, 4)
"""What a second on the wire counts: in the second search four, since a link that is as busy as the
hosts is no slower part of a step, and yet what it carries arrives late."""

NUM_REPLACED = 2
"""Fastest hosts that are left, which are tried in the place of one that is lost."""

ALIKE = 1.02
"""Steps that differ by less count as equal; then the plan with fewer stages comes first."""

CLOSE = 1.2
"""Steps of rehearsals that differ by less may be in the other order in a run."""


class Timed(NamedTuple):
    """A chain under the fastest options that the run may try."""

    step_s: float
    options: ScheduleOptions
    chain: Chain


class Planner:
    """Plans one job.

    Args:
        config, settings, links: see `ChainEstimates`.

    Attributes:
        estimates: of the steps of any plan, by what is known so far.
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
        self._constraints = constraints or Constraints()
        self.estimates = ChainEstimates(config, settings, hosts, links)
        self._held: dict[int, dict[str, int]] = {}
        self._use(hosts)

    def _use(self, hosts: Sequence[PlanHost]) -> None:
        """Plan for these hosts from now on."""
        self._hosts = hosts
        self._best: list[Timed] | None = None
        count, recompute = self._config.num_microbatches, self._settings.recompute
        self._costs = [
            HostCosts(host.profile, host.limit_bytes, count, recompute, host.besides_s)
            for host in hosts
        ]
        required = (i for i, h in enumerate(hosts) if h.address in self._constraints.required)
        members = frozenset(required)
        self._search, *self._others = (
            ChainSearch(self._costs, partial(self._transfer, weight), self._most_held, members)
            for weight in LINK_WEIGHTS
        )

    def to_rehearse(self) -> tuple[Config, Timed] | None:
        """Return the best plan that was not rehearsed, as a job; None if all have been."""
        for timed in self._ranked():
            chain = timed.chain
            if self.estimates.of(chain) is None and chain.key not in self.estimates.failed:
                return self.estimates.job(chain, timed.options), timed
        return None

    def to_rehearse_again(self) -> tuple[Config, Timed] | None:
        """Return one of the best two plans, as a job, that was rehearsed once, if they are close.

        The best of several rehearsals was lucky as well: its run may be slower than the next one's.
        """
        best = self._ranked()[:2]
        if len(best) < 2 or best[1].step_s > CLOSE * best[0].step_s:
            return None
        for timed in best:
            known = self.estimates.of(timed.chain)
            if known is not None and known.times == 1:
                return self.estimates.job(timed.chain, timed.options), timed
        return None

    def learn(self, timed: Timed, measured: MeasuredSteps) -> None:
        """Plan from now on by what steps of a plan have taught; see `ChainEstimates.learn`."""
        self.estimates.learn(timed.chain, timed.options, measured)
        self._use(self.estimates.hosts)

    def give_up(self, timed: Timed) -> None:
        """Rank a plan last, since its steps could not be trained."""
        self.estimates.failed.add(timed.chain.key)
        self._best = None

    def plans(self) -> list[Plan]:
        """Return the best plans that differ in who takes part, the fastest first.

        Raises:
            ConfigError: the hosts are too small for the model, however it is cut.
        """
        if not (ranked := self._ranked()):
            raise self._too_small()
        return [self._plan(*timed) for timed in ranked]

    def _chains(self) -> list[Chain]:
        """Return the fastest chain for each number of stages for which one fits."""
        found = []
        for number in self._search.nums_stages:
            chains = [search.best(number) for search in (self._search, *self._others)]
            found += self._fastest(filter(None, chains))[:1]
        return found

    def _ranked(self) -> list[Timed]:
        """Return the best plans that differ in who takes part, the fastest first."""
        if self._best is None:
            timed = [self._under_best_options(chain) for chain in self._candidates()]
            timed.sort(key=self._rank)
            alike = [
                each
                for each in timed
                if each.step_s <= ALIKE * timed[0].step_s
                and each.chain.key not in self.estimates.failed
            ]
            first = min(alike, key=lambda each: len(each.chain.hosts), default=None)
            timed.sort(key=lambda each: each is not first)
            self._best = timed[:NUM_PLANS]
        return self._best

    def _rank(self, timed: Timed) -> tuple[bool, float, int, Chain]:
        """Return what plans are sorted by: one that was not tried may be worse than it looks."""
        step_s, _, chain = timed
        if self.estimates.rehearsed and self.estimates.of(chain) is None:
            step_s /= 1 - NOTABLE
        return chain.key in self.estimates.failed, step_s, len(chain.hosts), chain

    def _candidates(self) -> Iterable[Chain]:
        """Return chains that may be the fastest of their hosts.

        One that was rehearsed is replaced only by what is clearly faster.
        """
        fastest = self._fastest(self._chains())
        pairs = (
            (chain, host)
            for chain in fastest[:NUM_NEAR]
            for host in chain.hosts
            if host not in self._search.required
        )
        near = filter(None, (self._without(*pair) for pair in pairs))
        quickest = sorted(near, key=lambda chain: chain.ns)[:NUM_PLANS]
        chains = {frozenset(chain.hosts): chain for chain in (*quickest, *fastest)}
        for known in self.estimates.rehearsed.values():
            other = chains.get(members := frozenset(known.chain.hosts))
            seconds = math.inf if other is None else self._under_best_options(other).step_s
            if self.estimates.of(other or known.chain) is None:
                seconds /= 1 - NOTABLE
            if known.step_s < seconds:
                chains[members] = known.chain
        return chains.values()

    def _fastest(self, chains: Iterable[Chain]) -> list[Chain]:
        """Return the fastest few under the options that the run starts with."""
        timed = ((self.estimates.step_seconds(chain), len(chain.hosts), chain) for chain in chains)
        return [chain for *_, chain in sorted(timed)[:SIMULATED]]

    def _most_held(self, num_stages: int, depth: int) -> int:
        if num_stages not in self._held:
            self._held[num_stages] = cost_model.held(self.estimates.job_with(num_stages))
        return self._held[num_stages][f"stage{num_stages - depth}"]

    def _transfer(self, weight: int, one: int, other: int, start: int) -> int:
        step_bytes = self._config.num_microbatches * self.estimates.bytes_before(start)
        pair = frozenset((self._hosts[one].address, self._hosts[other].address))
        if 2 * step_bytes > self._constraints.budgets.get(pair, UNLIMITED):
            return FORBIDDEN
        seconds = step_bytes / self.estimates.connection(one, other).bytes_per_s
        return round(weight * NANOSECONDS * seconds)

    def _under_best_options(self, chain: Chain) -> Timed:
        if (known := self.estimates.of(chain)) is not None:
            return Timed(self.estimates.step_seconds(chain, known.options), known.options, chain)
        config = self.estimates.job_with(len(chain.hosts))
        timed = [
            (self.estimates.step_seconds(chain, options), number, options)
            for number, options in enumerate(options_to_try(config))
            if number == 0 or self._fits(chain, options.on(config))
        ]
        step_s, _, options = min(timed, key=lambda each: each[:2])
        return Timed(step_s, options, chain)

    def _fits(self, chain: Chain, config: Config) -> bool:
        held = cost_model.held(config).values()
        parts = zip(chain.hosts, bounds(chain.balance), held, strict=True)
        return all(self._overrun(host, part, number) <= 0 for host, part, number in parts)

    def _overrun(self, host: int, part: tuple[int, int], held: int) -> int:
        limit = self._costs[host].limit_bytes
        return 0 if limit is None else self._costs[host].memory(*part, held) - limit

    def _plan(self, step_s: float, options: ScheduleOptions, chain: Chain) -> Plan:
        known = self.estimates.of(chain)
        parts = list(zip(chain.hosts, bounds(chain.balance), strict=True))
        busy_s = [self._costs[host].ns(*part) / NANOSECONDS for host, part in parts]
        busy_s = busy_s if known is None else known.busy_s
        held = cost_model.held(options.on(self.estimates.job_with(len(chain.hosts)))).values()
        stages = [
            PlannedStage(
                self._hosts[host].address,
                part,
                seconds,
                self._costs[host].memory(*part, number),
                self._costs[host].limit_bytes,
            )
            for (host, part), seconds, number in zip(parts, busy_s, held, strict=True)
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
            known is not None,
        )

    def _planned_links(self, chain: Chain) -> Iterator[PlannedLink]:
        parts = bounds(chain.balance)
        for one, other, (_, end) in zip(chain.hosts, chain.hosts[1:], parts, strict=False):
            yield PlannedLink(
                self._hosts[one].address,
                self._hosts[other].address,
                2 * self._config.num_microbatches * self.estimates.bytes_before(end),
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
        fits = self._fits(chain, options.on(self.estimates.job_with(len(chain.hosts))))
        return self.estimates.step_seconds(chain, options if fits else None)

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
