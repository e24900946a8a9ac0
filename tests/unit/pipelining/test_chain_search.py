"""The choice of hosts and their order, against all there are."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from rpcmp.pipelining import chain_search
from rpcmp.pipelining.chain_cuts import FORBIDDEN, UNLIMITED, HostCosts, Within
from rpcmp.pipelining.chain_search import ChainSearch
from rpcmp.pipelining.partition import HostProfile, LayerProfile
from tests.support.planning import layer, profile

HELD = (lambda count, depth: depth, lambda count, depth: count + 1, lambda count, depth: 3)
"""How many micro-batches a stage holds: under 1f1b, zero-bubble and gpipe."""


def test_it_finds_the_best_of_all_orders_and_cuts() -> None:
    feasible = 0
    for seed in range(60):
        search = small_search(seed)
        for num_stages in search.nums_stages:
            best, found = brute_force(search, num_stages), search.best(num_stages)
            assert (None if found is None else found.ns) == best, (seed, num_stages)
            feasible += best is not None
    assert feasible > 60


def test_the_memory_that_lacks_is_the_least_with_which_a_chain_fits() -> None:
    lacking = 0
    for seed in range(60):
        search = small_search(seed)
        if any(brute_force(search, number) is not None for number in search.nums_stages):
            continue
        extra = next((x for x in range(200) if fits_with(search, x)), None)
        found = search.lacking()
        assert (None if found is None else found[0]) == extra, seed
        lacking += extra is not None
    assert lacking >= 5


def test_many_hosts_take_little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of 32 hosts and 200 layers ends after so many looks at an order."""
    looks = 0
    starts_of = Within.starts_of

    def counted(self: Within, *args: Any) -> list[int]:
        nonlocal looks
        looks += 1
        return starts_of(self, *args)

    monkeypatch.setattr(Within, "starts_of", counted)
    draw = random.Random(0)
    hosts = [
        HostCosts(profile([layer(speed * draw.uniform(0.9, 1.1))] * 200), None, 4)
        for speed in (draw.uniform(1, 3) for _ in range(32))
    ]
    search = ChainSearch(hosts, lambda one, other, start: 0, HELD[0])
    assert not search.is_exact
    chain = search.best(12)
    assert chain is not None
    fastest = sorted(range(32), key=lambda host: hosts[host].total_ns)[:12]
    assert set(chain.hosts) == set(fastest)
    assert looks < 2 * chain_search.TRIALS


def test_hill_climbing_exchanges_hosts_and_keeps_those_required() -> None:
    """Of many hosts, the fast ones that a slow link keeps apart do not sit beside each other."""
    hosts = [HostCosts(profile([layer(1 + number / 10)] * 24), None, 1) for number in range(12)]

    def transfer(one: int, other: int, start: int) -> int:
        return 20 * 10**9 if {one, other} == {0, 1} else 0

    chain = ChainSearch(hosts, transfer, HELD[0], frozenset({11})).best(4)
    assert chain is not None
    assert 11 in chain.hosts
    assert {0, 1} not in [set(pair) for pair in itertools.pairwise(chain.hosts)]
    assert chain.ns < 20 * 10**9


def small_search(seed: int) -> ChainSearch:
    """Return a search with random costs of a few nanoseconds and bytes."""
    draw = random.Random(seed)
    count, num_layers = draw.randint(1, 4), draw.randint(1, 6)
    hosts = [
        HostCosts(
            random_profile(draw, num_layers),
            draw.choice([None, draw.randint(5, 60)]),
            draw.randint(1, 3),
            draw.random() < 0.3,
            draw.choice([0, 3e-9, 20e-9]),
        )
        for _ in range(count)
    ]
    busy = {
        key: draw.choice([0, draw.randint(0, 40), draw.randint(0, 10), FORBIDDEN])
        for key in itertools.product(range(count), range(count), range(num_layers))
    }
    required = frozenset(host for host in range(count) if draw.random() < 0.2)
    return ChainSearch(hosts, lambda *key: busy[key], draw.choice(HELD), required)


def random_profile(draw: random.Random, num_layers: int) -> HostProfile:
    def layers() -> LayerProfile:
        return LayerProfile(
            forward_s=draw.randint(0, 5) * 1e-9,
            backward_s=draw.randint(0, 5) * 1e-9,
            weight_s=draw.randint(0, 3) * 1e-9,
            update_s=draw.randint(0, 2) * 1e-9,
            state_bytes=draw.randint(0, 9),
            activation_bytes=draw.randint(0, 3),
            input_bytes=draw.randint(0, 5),
        )

    return profile([layers() for _ in range(num_layers)], base=2)


def brute_force(search: ChainSearch, num_stages: int, extra: int = 0) -> int | None:
    """Return the least nanoseconds of all orders and cuts; None if none fits."""
    costs, best = search.costs, UNLIMITED
    for order in itertools.permutations(range(len(search.hosts)), num_stages):
        if not search.required <= set(order):
            continue
        for cuts in itertools.combinations(range(1, costs.num_layers), num_stages - 1):
            best = min(best, slowest(search, order, [0, *cuts, costs.num_layers], extra))
    return None if best == UNLIMITED else best


def slowest(search: ChainSearch, order: tuple[int, ...], ends: list[int], extra: int) -> int:
    costs, times = search.costs, []
    for place, host in enumerate(order):
        start, end = ends[place], ends[place + 1]
        held, limit = costs.held(len(order), len(order) - place), search.hosts[host].limit_bytes
        if limit is not None and search.hosts[host].memory(start, end, held) > limit + extra:
            return UNLIMITED
        times.append(search.hosts[host].ns(start, end))
        if place:
            before = order[place - 1]
            times += [costs.transfer(before, host, start), costs.transfer(host, before, start)]
    return min(UNLIMITED, max(times))


def fits_with(search: ChainSearch, extra: int) -> bool:
    return any(brute_force(search, n, extra) is not None for n in search.nums_stages)
