"""What losing a host of a plan costs: a spare takes over, or the job is planned without it. Pure.

The hosts that are left become spares, first those that can take over most stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.pipelining.chain_cuts import Chain
from rpcmp.pipelining.chain_estimates import ChainEstimates
from rpcmp.pipelining.chain_limits import ChainLimits
from rpcmp.pipelining.chain_search import ChainSearch
from rpcmp.pipelining.plan import HostLoss

NUM_REPLACED = 2
"""Fastest hosts that are left, which are tried in the place of one that is lost."""


class Replacements:
    """Chains that take the place of a chain that has lost a host."""

    def __init__(self, estimates: ChainEstimates, limits: ChainLimits, search: ChainSearch) -> None:
        self._estimates, self._limits, self._search = estimates, limits, search

    def spares(self, chain: Chain) -> list[int]:
        """Return the hosts that are left and can take over a stage, most versatile first."""
        can_take = {
            host: sum(
                self._limits.replaced(chain, place, host) is not None
                for place in range(len(chain.hosts))
            )
            for host in self._left_by(chain)
        }
        able = [host for host, stages in can_take.items() if stages]
        return sorted(able, key=lambda host: (-can_take[host], self._limits.costs[host].total_ns))

    def losses(
        self, chain: Chain, spares: Sequence[int], options: ScheduleOptions
    ) -> list[HostLoss]:
        """Return what losing each host of a chain costs, with these spares."""
        return [self._loss(chain, place, spares, options) for place in range(len(chain.hosts))]

    def without(self, chain: Chain, host: int) -> Chain | None:
        """Return the best chain near this one that does without a host."""
        place, order = chain.hosts.index(host), chain.hosts
        rest = sorted(self._left_by(chain), key=lambda other: self._limits.costs[other].total_ns)
        others = dict.fromkeys([*self.spares(chain)[:1], *rest[:NUM_REPLACED]])
        orders: Iterable[tuple[int, ...]] = [
            *((*order[:place], other, *order[place + 1 :]) for other in others),
            *([(*order[:place], *order[place + 1 :])] if len(order) > 1 else []),
        ]
        chains = filter(None, map(self._search.cut, orders))
        return min(chains, key=lambda chain: chain.ns, default=None)

    def _left_by(self, chain: Chain) -> list[int]:
        return [host for host in range(len(self._limits.costs)) if host not in chain.hosts]

    def _loss(
        self, chain: Chain, place: int, spares: Sequence[int], options: ScheduleOptions
    ) -> HostLoss:
        hosts, lost = self._estimates.hosts, chain.hosts[place]
        for spare in spares:
            if (replaced := self._limits.replaced(chain, place, spare)) is not None:
                spare_step_s = self._step_seconds(replaced, options)
                return HostLoss(hosts[lost].address, hosts[spare].address, spare_step_s)
        without = self.without(chain, lost)
        step_s = None if without is None else self._step_seconds(without, options)
        return HostLoss(hosts[lost].address, None, step_s)

    def _step_seconds(self, chain: Chain, options: ScheduleOptions) -> float:
        """Return the seconds per step of another chain under these options, if they fit there."""
        config = options.on(self._estimates.job_with(len(chain.hosts)))
        fits = self._limits.fits(chain, config)
        return self._estimates.step_seconds(chain, options if fits else None)
