"""Choose a chain's hosts, their order and its cuts, so that its slowest part is as fast as can be.

A part is what a host computes in a step, or what a link carries in one direction. The cuts for an
order of hosts are exact, see `chain_cuts`. Between them and a bisection on the time of the slowest
part lies the choice of the hosts:

- up to EXACT_HOSTS by dynamic programming over the sets of hosts that serve a suffix of the chain.
  The time is the best one to a thousandth, far below what measurements can tell apart.
- beyond it by hill climbing: the fastest hosts first, then exchanges of one host and swaps of two,
  while they help, and at most TRIALS of them.

Pure: no torch, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from rpcmp.pipelining.chain_cuts import UNLIMITED, Chain, Costs, Held, HostCosts, Transfer, Within

EXACT_HOSTS = 10
"""The most hosts of which every set and order counts: one more is more than twice the work."""

TRIALS = 400
"""Orders of hosts that hill climbing tries for each number of stages."""

PRECISION = 1000


class ChainSearch:
    """Finds chains of some of the hosts.

    Args:
        required: indices of hosts that take part in every chain.
    """

    def __init__(
        self,
        hosts: Sequence[HostCosts],
        transfer: Transfer,
        held: Held,
        required: frozenset[int] = frozenset(),
    ) -> None:
        self.hosts, self.required = hosts, required
        self.costs = Costs(hosts, transfer, held)

    @property
    def is_exact(self) -> bool:
        return len(self.hosts) <= EXACT_HOSTS

    @property
    def nums_stages(self) -> range:
        """Every number of stages that a chain may have."""
        return range(max(1, len(self.required)), min(len(self.hosts), self.costs.num_layers) + 1)

    def best(self, num_stages: int) -> Chain | None:
        """Return the fastest chain of so many hosts; None if none fits into memory."""
        found = self._climb(num_stages)
        return self._refined(num_stages, found) if self.is_exact else found

    def cut(self, order: Sequence[int]) -> Chain | None:
        """Return the best cuts for hosts in this order; None if none fits into memory."""
        return self._cut_within(order, UNLIMITED)

    def lacking(self) -> tuple[int, Chain] | None:
        """Return the least memory that each host needs besides, and a chain that then fits.

        None if none fits with any memory, because of the links.
        """
        low, high = 0, UNLIMITED
        found = self._any_with(high)
        while found is not None and high - low > max(1, high // PRECISION):
            middle = (low + high) // 2
            if (closer := self._any_with(middle)) is None:
                low = middle
            else:
                high, found = middle, closer
        return None if found is None else (high, found)

    def _any_with(self, extra: int) -> Chain | None:
        costs = self.costs
        within = Within(Costs(costs.hosts, costs.transfer, costs.held, extra), UNLIMITED)
        for num_stages in reversed(self.nums_stages):
            orders: Iterable[tuple[int, ...]] = self._starting_orders(num_stages)
            if self.is_exact:
                orders = filter(None, [_any_order(within, num_stages, self.required)])
            for order in orders:
                if (chain := within.cut(order)) is not None:
                    return chain
        return None

    def _cut_within(self, order: Sequence[int], most: int) -> Chain | None:
        """Return the most even of the best cuts that take at most this time."""

        def fits(most: int) -> bool:
            return bool(Within(self.costs, most).starts_of(order)[0] & 1)

        if not fits(most):
            return None
        low, high = 0, min(most, self.costs.longest(order))
        while high - low > high // PRECISION:
            middle = (low + high) // 2
            if fits(middle):
                high = middle
            else:
                low = middle + 1
        return Within(self.costs, high).cut(order)

    def _refined(self, num_stages: int, best: Chain | None) -> Chain | None:
        """Return a chain to which none is faster by more than a thousandth."""

        def within(most: int) -> Chain | None:
            bound = Within(self.costs, most)
            order = _any_order(bound, num_stages, self.required)
            return None if order is None else self._cut_within(order, most)

        best, low = best or within(UNLIMITED), 0
        while best is not None:
            found = within(best.ns - 1 - best.ns // PRECISION)
            if found is None:
                break
            best, middle = found, (low + found.ns) // 2
            if (faster := within(middle)) is None:
                low = middle + 1
            else:
                best = faster
        return best

    def _starting_orders(self, num_stages: int) -> Iterator[tuple[int, ...]]:
        """Yield some orders: of the fastest hosts, or those with most memory, which comes first."""

        def space(host: int) -> int:
            limit = self.hosts[host].limit_bytes
            return UNLIMITED if limit is None else limit

        def by_speed(host: int) -> int:
            return self.hosts[host].total_ns

        everyone = sorted(range(len(self.hosts)), key=by_speed)
        for ranked in (everyone, sorted(everyone, key=space, reverse=True)):
            chosen = sorted(ranked, key=lambda host: host not in self.required)[:num_stages]
            yield tuple(sorted(chosen, key=space, reverse=True))
            yield tuple(sorted(chosen))

    def _climb(self, num_stages: int) -> Chain | None:
        chains = filter(None, map(self.cut, self._starting_orders(num_stages)))
        best = min(chains, key=lambda chain: chain.ns, default=None)
        trials = 0
        while best is not None:
            within = Within(self.costs, best.ns - 1 - best.ns // PRECISION)
            for order in self._neighbours(best.hosts):
                trials += 1
                if trials > TRIALS:
                    return best
                if within.starts_of(order)[0] & 1:
                    best = self._cut_within(order, within.most)
                    break
            else:
                return best
        return best

    def _neighbours(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        others = [host for host in range(len(self.hosts)) if host not in order]
        for place, host in enumerate(order):
            if host not in self.required:
                for other in others:
                    yield (*order[:place], other, *order[place + 1 :])
        for one, other in combinations(range(len(order)), 2):
            swapped = list(order)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            yield tuple(swapped)


def _any_order(within: Within, num_stages: int, required: frozenset[int]) -> tuple[int, ...] | None:
    """Return an order of hosts for which there are cuts, if there is one, of all orders.

    By dynamic programming: `first[set][host]` has the layers at which a suffix of the chain can
    start that is served by this set of hosts, of which `host` is the first.
    """
    costs = within.costs
    count, needed = len(costs.hosts), sum(1 << host for host in required)
    first: list[dict[int, int]] = [{} for _ in range(1 << count)]
    for members in range(1, 1 << count):
        depth = members.bit_count()
        if depth > num_stages:
            continue
        held = costs.held(num_stages, depth)
        for host in range(count):
            if not members >> host & 1:
                continue
            after = members ^ 1 << host
            ends = 0 if after else 1 << costs.num_layers
            for other, starts in first[after].items():
                ends |= starts & within.linked(host, other)
            if ends and (starts := within.starts(host, held, ends)):
                first[members][host] = starts
        if depth == num_stages and members & needed == needed:
            for host, starts in first[members].items():
                if starts & 1:
                    return _traced(within, first, members, host)
    return None


def _traced(
    within: Within, first: Sequence[dict[int, int]], members: int, host: int
) -> tuple[int, ...]:
    """Return the order of hosts by which `host` can start at the first layer."""
    num_stages, start, order = members.bit_count(), 0, [host]
    while members := members ^ 1 << host:
        held = within.costs.held(num_stages, members.bit_count() + 1)
        for other, starts in first[members].items():
            ends = starts & within.linked(host, other)
            if within.starts(host, held, ends) >> start & 1:
                reachable = ends >> start + 1
                start += 1 + (reachable & -reachable).bit_length() - 1
                order.append(other)
                host = other
                break
        else:
            raise AssertionError("a start came from nowhere")
    return tuple(order)
