"""Plan a job for given hosts: who serves which layers, in which order, and who stands by. Pure.

(1) for each number of stages, chains of hosts whose slowest part is fastest     `chain_search`
(2) each simulated with the links between its hosts: the time of a step     `chain_estimates`
(3) the fastest few also under the other schedule options                   `setting_grid`
(4) the fastest that differ in who takes part, with what losing each host costs

The caller rehearses the plans, the best one first: what their steps teach may make others the best,
until those that are left have been tried, the best two twice if they are nearly equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import NOTABLE, MeasuredSteps
from rpcmp.pipelining.chain_cuts import NANOSECONDS, Chain
from rpcmp.pipelining.chain_estimates import ChainEstimates
from rpcmp.pipelining.chain_limits import ChainLimits
from rpcmp.pipelining.chain_search import ChainSearch
from rpcmp.pipelining.partition import bounds
from rpcmp.pipelining.plan import (
    Connection,
    Constraints,
    Pair,
    Plan,
    PlanHost,
    PlannedLink,
    PlannedStage,
)
from rpcmp.pipelining.replacements import Replacements
from rpcmp.pipelining.setting_grid import options_to_try

NUM_PLANS = 3

SIMULATED = 4
"""Chains of different lengths that are simulated under all schedule options."""

NUM_NEAR = 2
"""Chains of which also those are considered that do without one of their hosts."""

LINK_WEIGHTS = (1, 4)
"""What a second on the wire counts: in the second search four, since a link that is as busy as the
hosts is no slower part of a step, and yet what it carries arrives late."""

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
        self._constraints = constraints or Constraints()
        self.estimates = ChainEstimates(config, settings, hosts, links)
        self._start()

    def _start(self) -> None:
        """Plan by the estimates as they are now."""
        self._best: list[Timed] | None = None
        self._limits = limits = ChainLimits(self.estimates, self._constraints)
        self._search, *self._others = (
            ChainSearch(
                limits.costs,
                partial(limits.transfer_ns, weight),
                limits.most_held,
                limits.required,
            )
            for weight in LINK_WEIGHTS
        )
        self._replacements = Replacements(self.estimates, limits, self._search)

    def to_rehearse(self) -> Timed | None:
        """Return the best plan that was not rehearsed; None if all have been."""
        for timed in self._ranked():
            chain = timed.chain
            if self.estimates.of(chain) is None and chain.key not in self.estimates.failed:
                return timed
        return None

    def to_rehearse_again(self) -> Timed | None:
        """Return one of the best two plans that was rehearsed only once, if they are close.

        The best of several rehearsals was lucky as well: its run may be slower than the next one's.
        """
        best = self._ranked()[:2]
        if len(best) < 2 or best[1].step_s > CLOSE * best[0].step_s:
            return None
        for timed in best:
            known = self.estimates.of(timed.chain)
            if known is not None and known.times == 1:
                return timed
        return None

    def job(self, timed: Timed) -> Config:
        """Return the job as this plan has it."""
        return self.estimates.job(timed.chain, timed.options)

    def learn(self, timed: Timed, measured: MeasuredSteps) -> None:
        """Plan from now on by what steps of a plan have taught; see `ChainEstimates.learn`."""
        self.estimates.learn(timed.chain, timed.options, measured)
        self._start()

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
            raise self._limits.too_small(self._search)
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
            if host not in self._limits.required
        )
        near = filter(None, (self._replacements.without(*pair) for pair in pairs))
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

    def _under_best_options(self, chain: Chain) -> Timed:
        if (known := self.estimates.of(chain)) is not None:
            return Timed(self.estimates.step_seconds(chain, known.options), known.options, chain)
        config = self.estimates.job_with(len(chain.hosts))
        timed = [
            (self.estimates.step_seconds(chain, options), number, options)
            for number, options in enumerate(options_to_try(config))
            if number == 0 or self._limits.fits(chain, options.on(config))
        ]
        step_s, _, options = min(timed, key=lambda each: each[:2])
        return Timed(step_s, options, chain)

    def _plan(self, step_s: float, options: ScheduleOptions, chain: Chain) -> Plan:
        known, hosts = self.estimates.of(chain), self.estimates.hosts
        parts = list(zip(chain.hosts, bounds(chain.balance), strict=True))
        costs = self._limits.costs
        busy_s = [costs[host].ns(*part) / NANOSECONDS for host, part in parts]
        busy_s = busy_s if known is None else known.busy_s
        held = cost_model.held(options.on(self.estimates.job_with(len(chain.hosts)))).values()
        stages = [
            PlannedStage(
                hosts[host].address,
                part,
                seconds,
                costs[host].memory(*part, number),
                costs[host].limit_bytes,
            )
            for (host, part), seconds, number in zip(parts, busy_s, held, strict=True)
        ]
        spares = self._replacements.spares(chain)
        others = set(range(len(hosts))).difference(chain.hosts, spares)
        busy = sum(stage.busy_s for stage in stages)
        return Plan(
            stages,
            list(self._planned_links(chain)),
            [hosts[spare].address for spare in spares],
            [hosts[other].address for other in sorted(others)],
            options,
            step_s,
            max(0.0, 1.0 - busy / (step_s * len(stages))) if step_s else 0.0,
            self._replacements.losses(chain, spares, options),
            known is not None,
        )

    def _planned_links(self, chain: Chain) -> Iterator[PlannedLink]:
        parts, hosts = bounds(chain.balance), self.estimates.hosts
        for one, other, (_, end) in zip(chain.hosts, chain.hosts[1:], parts, strict=False):
            yield PlannedLink(
                hosts[one].address,
                hosts[other].address,
                2 * self.estimates.config.num_microbatches * self.estimates.bytes_before(end),
                self._search.costs.busy(one, other)[end - 1] / NANOSECONDS,
            )
