"""A plan as plain data."""

from __future__ import annotations

import json

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.pipelining.plan import HostLoss, Plan, PlannedLink, PlannedStage


def test_a_plan_is_plain_data_with_its_balance() -> None:
    plan = Plan(
        stages=[PlannedStage("a:1", (0, 2), 0.5, 100, None), PlannedStage("b:1", (2, 7), 1, 9, 8)],
        links=[PlannedLink("a:1", "b:1", 800, 0.25)],
        spares=["c:1"],
        unused=[],
        options=ScheduleOptions(num_microbatches=4),
        step_s=2.0,
        bubble=0.5,
        losses=[HostLoss("a:1", "c:1", 3.0), HostLoss("b:1", None, None)],
    )
    data = json.loads(json.dumps(plan.as_json()))
    assert data["balance"] == plan.balance == [2, 5]
    assert data["options"]["schedule"] == "1f1b"
    assert [stage["address"] for stage in data["stages"]] == ["a:1", "b:1"]
    assert data["losses"][0] == {"address": "a:1", "spare": "c:1", "step_s": 3.0}
