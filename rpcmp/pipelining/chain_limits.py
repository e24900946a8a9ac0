"""What chains of hosts have to keep to: the hosts' memory, and the budgets of their links. Pure."""

from __future__ import annotations

from rpcmp.config.schema import Config
from rpcmp.config.types import format_size
from rpcmp.errors import ConfigError
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.chain_cuts import FORBIDDEN, NANOSECONDS, UNLIMITED, Chain, HostCosts
from rpcmp.pipelining.chain_estimates import ChainEstimates
from rpcmp.pipelining.chain_search import ChainSearch
from rpcmp.pipelining.partition import bounds
from rpcmp.pipelining.plan import Constraints


class ChainLimits:
    """The limits of chains of some hosts.

    Args:
        estimates: of the job's steps, with the hosts as they are known by now.

    Attributes:
        costs: of each host.
        required: indices of the hosts that take part in every chain.
    """

    def __init__(self, estimates: ChainEstimates, constraints: Constraints) -> None:
        self._estimates, self._budgets = estimates, constraints.budgets
        self._num_microbatches = estimates.config.num_microbatches
        self.costs = [
            HostCosts(
                host.profile,
                host.limit_bytes,
                self._num_microbatches,
                estimates.settings.recompute,
                host.besides_s,
            )
            for host in estimates.hosts
        ]
        self.required = frozenset(
            number
            for number, host in enumerate(estimates.hosts)
            if host.address in constraints.required
        )
        self._held: dict[int, dict[str, int]] = {}

    def most_held(self, num_stages: int, depth: int) -> int:
        """Return the micro-batches that a stage holds under the options that the run starts with.

        Args:
            depth: the number of stages from it to the loss.
        """
        if num_stages not in self._held:
            self._held[num_stages] = cost_model.held(self._estimates.job_with(num_stages))
        return self._held[num_stages][f"stage{num_stages - depth}"]

    def transfer_ns(self, weight: int, one: int, other: int, start: int) -> int:
        """Return the nanoseconds of a link per step, times `weight`, if a stage starts there.

        FORBIDDEN if the link's budget is less than passes in both directions.
        """
        hosts = self._estimates.hosts
        step_bytes = self._num_microbatches * self._estimates.bytes_before(start)
        pair = frozenset((hosts[one].address, hosts[other].address))
        if 2 * step_bytes > self._budgets.get(pair, UNLIMITED):
            return FORBIDDEN
        seconds = step_bytes / self._estimates.connection(one, other).bytes_per_s
        return round(weight * NANOSECONDS * seconds)

    def overrun(self, host: int, part: tuple[int, int], held: int) -> int:
        """Return the bytes by which these layers exceed a host's memory; 0 or less: they fit."""
        limit = self.costs[host].limit_bytes
        return 0 if limit is None else self.costs[host].memory(*part, held) - limit

    def fits(self, chain: Chain, config: Config) -> bool:
        """Return whether each host of a chain has the memory for a config's options."""
        held = cost_model.held(config).values()
        parts = zip(chain.hosts, bounds(chain.balance), held, strict=True)
        return all(self.overrun(host, part, number) <= 0 for host, part, number in parts)

    def replaced(self, chain: Chain, place: int, spare: int) -> Chain | None:
        """Return the chain with a spare in a stage's place; None if the stage does not fit."""
        part, count = bounds(chain.balance)[place], len(chain.hosts)
        if self.overrun(spare, part, self.most_held(count, count - place)) > 0:
            return None
        hosts = (*chain.hosts[:place], spare, *chain.hosts[place + 1 :])
        ways = zip(hosts, hosts[1:], bounds(chain.balance), strict=False)
        if any(self.transfer_ns(1, one, other, end) == FORBIDDEN for one, other, (_, end) in ways):
            return None
        return chain._replace(hosts=hosts)

    def too_small(self, search: ChainSearch) -> ConfigError:
        """Return why no chain keeps to them, and what to do."""
        if (needed := len(self.required)) > (num_layers := self.costs[0].num_layers):
            return ConfigError(
                f"{needed} hosts have to take part, but the model has {num_layers} layers; require "
                "fewer"
            )
        lacking = search.lacking()
        if lacking is None:
            return ConfigError(
                "no plan keeps to the budgets of the links with the hosts that have to take part; "
                "raise a budget, or require fewer hosts"
            )
        extra, chain = lacking
        parts, count = bounds(chain.balance), len(chain.hosts)
        held = [self.most_held(count, count - place) for place in range(count)]
        overruns = [*map(self.overrun, chain.hosts, parts, held)]
        worst = overruns.index(max(overruns))
        number, (start, end) = chain.hosts[worst], parts[worst]
        host = self._estimates.hosts[number]
        needs = self.costs[number].memory(start, end, held[worst])
        return ConfigError(
            f"no plan fits into the memory of {len(self.costs)} hosts: each would need "
            f"{format_size(extra)} more. In the plan that comes nearest, with balance = "
            f"{list(chain.balance)}, {host.address} needs {format_size(needs)} for layers "
            f"{start} to {end - 1} and may have {format_size(host.limit_bytes or 0)}; take more "
            "hosts, smaller micro-batches, a smaller max_in_flight, or recompute = true"
        )
