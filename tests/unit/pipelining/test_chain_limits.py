"""Plans keep to the memory of hosts, to the budgets of links, and to who has to take part."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rpcmp.errors import ConfigError
from rpcmp.pipelining.plan import Constraints, PlanHost
from tests.support.planning import hosts, layer, plans, profile, served_by

MB = 10**6


def test_more_hosts_than_layers_cannot_all_take_part() -> None:
    given = hosts(*[1] * 9)
    required = Constraints(frozenset(host.address for host in given), {})
    with pytest.raises(ConfigError, match="9 hosts have to take part, but the model has 8 layers"):
        plans(given, None, required)


def test_a_budget_forbids_the_cuts_that_would_exceed_it() -> None:
    sizes = [MB] * 3 + [1000] + [MB] * 4
    given = [
        PlanHost(f"host{i}:1", profile([layer(1, received=size) for size in sizes]))
        for i in range(2)
    ]
    budgets = {frozenset(("host0:1", "host1:1")): 2 * 4 * 1000}
    required = frozenset(("host0:1", "host1:1"))
    best = plans(given, None, Constraints(required, budgets))[0]
    assert best.balance == [3, 5]
    budgets = dict.fromkeys(budgets, 100)
    with pytest.raises(ConfigError, match="no plan keeps to the budgets of the links"):
        plans(given, None, Constraints(required, budgets))
    assert len(plans(given, None, Constraints(frozenset(), budgets))[0].stages) == 1


def test_a_required_host_takes_part_in_every_plan() -> None:
    found = plans(hosts(1, 1, 9), None, Constraints(frozenset(("host2:1",))))
    assert all("host2:1" in served_by(plan) for plan in found)


def test_a_model_that_fits_no_host_is_cut_by_memory() -> None:
    given = hosts(1, 9, limit=600, kept=100)  # of 8 layers
    best = plans(given)[0]
    layers = dict(zip(served_by(best), best.balance, strict=True))
    assert layers == {"host0:1": 6, "host1:1": 2}
    assert [stage.memory_bytes for stage in best.stages] == [100 * n for n in best.balance]


def test_hosts_that_are_too_small_in_any_plan_are_told_by_how_much() -> None:
    with pytest.raises(ConfigError) as raised:
        plans(hosts(1, 1, limit=300, kept=100))
    assert re.search(
        r"each would need 100 B more\. .* balance = \[4, 4\], host\d:1 needs 400 B for layers "
        r"\d to \d and may have 300 B",
        str(raised.value),
    )


def test_options_that_are_open_are_chosen_among_those_that_fit() -> None:
    open_: dict[str, Any] = {"schedule": "auto", "max_in_flight": "auto"}
    roomy = plans(hosts(1, 1, held=100), **open_)[0]
    assert roomy.options.schedule == "zero-bubble"
    tight = plans(hosts(1, 1, held=100, limit=800), **open_)[0]
    assert tight.options.schedule == "1f1b"  # the first stage holds two micro-batches
    assert roomy.step_s < tight.step_s
