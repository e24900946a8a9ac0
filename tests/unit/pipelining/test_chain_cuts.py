"""The cuts of a chain whose hosts have a given order."""

from __future__ import annotations

import random

from rpcmp.pipelining.chain_cuts import NANOSECONDS, UNLIMITED, Costs, HostCosts, Within
from rpcmp.pipelining.partition import StageHost, choose_balance
from tests.support.planning import layer, profile


def test_a_host_costs_what_it_does_as_a_stage() -> None:
    layers = [
        layer(2.0**-number, kept=number, held=10 * number, received=100 * number)
        for number in range(6)
    ]
    for recompute in (False, True):
        stage = StageHost("stage0", profile(layers, base=7), None, 4, 3, recompute)
        costs = HostCosts(profile(layers, base=7), None, 4, recompute)
        for start, end in ((0, 6), (1, 3), (5, 6)):
            assert costs.memory(start, end, held=3) == stage.memory(start, end)
            assert costs.ns(start, end) == NANOSECONDS * stage.seconds(start, end)


def test_the_cuts_are_as_even_as_those_of_an_automatic_balance() -> None:
    """Both minimize the slowest stage, and then the sum of squares."""
    for seed in range(20):
        draw = random.Random(seed)
        profiles = [profile([layer(draw.randint(1, 9)) for _ in range(7)]) for _ in range(3)]
        stages = [StageHost(f"stage{i}", each, None, 1, 1) for i, each in enumerate(profiles)]
        balance = choose_balance(stages)
        hosts = [HostCosts(each, None, 1) for each in profiles]
        ends = [0, balance[0], balance[0] + balance[1], 7]
        slowest = max(hosts[i].ns(ends[i], ends[i + 1]) for i in range(3))
        costs = Costs(hosts, lambda one, other, start: 0, lambda count, depth: 1)
        assert Within(costs, slowest - 1).cut((0, 1, 2)) is None
        cut = Within(costs, slowest).cut((0, 1, 2))
        assert cut is not None
        squares = [
            sum(hosts[i].ns(e[i], e[i + 1]) ** 2 for i in range(3))
            for e in (ends, [0, cut.balance[0], 7 - cut.balance[2], 7])
        ]
        assert (cut.ns, squares[1]) == (slowest, squares[0])


def test_only_starts_from_which_all_layers_left_fit_are_kept() -> None:
    host = HostCosts(profile([layer(1.0, kept=1)] * 6), 2, 1)
    costs = Costs([host] * 3, lambda one, other, start: 0, lambda count, depth: 1)
    starts = Within(costs, UNLIMITED).starts_of((0, 1, 2))
    assert starts == [0b001111, 0b011100, 0b110000]  # bit i: layer i
