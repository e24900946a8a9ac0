"""Who takes over from a lost host, and how long steps take then."""

from __future__ import annotations

from rpcmp.pipelining.plan import Constraints, PlanHost
from tests.support.planning import hosts, layer, plans, profile, served_by

MB = 10**6


def test_a_spare_keeps_to_the_budgets_too() -> None:
    pairs = [frozenset((f"host{i}:1", "host2:1")) for i in (0, 1)]
    given = [PlanHost(f"host{i}:1", profile([layer(1, received=MB)] * 8)) for i in range(3)]
    best = plans(given, None, Constraints(frozenset(), dict.fromkeys(pairs, 1)))[0]
    assert served_by(best) == ["host0:1", "host1:1"]
    assert [loss.spare for loss in best.losses] == [None, None]
    assert best.spares == []


def test_a_lost_host_costs_what_its_spare_is_slower_or_a_new_plan() -> None:
    with_spare, *_ = plans(hosts(1, 1, 2, layers=2), num_microbatches=4)
    assert served_by(with_spare) in (["host0:1", "host1:1"], ["host1:1", "host0:1"])
    assert with_spare.spares == ["host2:1"]
    assert [loss.spare for loss in with_spare.losses] == ["host2:1"] * 2
    assert [loss.step_s for loss in with_spare.losses] == [8, 9]  # the last one fills first
    alone, *_ = plans(hosts(1, 1, layers=2), num_microbatches=4)
    assert [(loss.spare, loss.step_s) for loss in alone.losses] == [(None, 8), (None, 8)]
    small, *_ = plans(hosts(1, 1, layers=2, limit=100, kept=100))
    assert [(loss.spare, loss.step_s) for loss in small.losses] == [(None, None)] * 2


def test_a_host_too_small_for_any_stage_is_no_spare() -> None:
    given = [
        *hosts(1, 1, layers=2, kept=100),
        PlanHost("tiny:1", profile([layer(1, kept=100)] * 2), 99),
    ]
    best = plans(given)[0]
    assert (best.spares, best.unused) == ([], ["tiny:1"])
