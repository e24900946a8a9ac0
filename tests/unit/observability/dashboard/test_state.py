"""The state of the page, without processes and browsers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.cli import progress_output
from rpcmp.observability.dashboard.history import MAX_ENTRIES, MAX_ROWS, Curve, Row
from rpcmp.observability.dashboard.html_report import html
from rpcmp.observability.dashboard.state import EVALUATIONS, State
from rpcmp.observability.events import KeptEvent
from tests.support import pageevents
from tests.support.pageevents import Event
from tests.support.runevents import typed


class Mirror:
    """The state that a browser builds from its messages, as `assets/model.js` does."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.parts: dict[str, Any] = {}
        self.rows: list[Any] = []
        self.entries: list[Any] = []

    def apply(self, message: dict[str, Any] | None) -> None:
        if message is None:
            return
        self.version = message["version"]
        self.parts |= message["parts"]
        if message["curve"] is not None:
            self.rows[message["curve"]["from"] :] = message["curve"]["rows"]
        self.entries += message["entries"]


def state_of(*events: Event) -> State:
    state = State()
    for event in events:
        state.apply(typed(event))
    return state


def part(state: State, name: str) -> Any:
    message = state.since(None)
    assert message is not None
    return message["parts"][name]


def health(state: State) -> dict[str, str]:
    return {worker["label"]: worker["state"] for worker in part(state, "workers")}


def test_changes_add_up_to_the_state_of_a_page_that_opens_late() -> None:
    state, always, seldom = State(), Mirror(), Mirror()
    for number, event in enumerate(pageevents.run(2 * MAX_ROWS + 100, lost_after=300)):
        state.apply(typed(event))
        always.apply(state.since(always.version))
        if number % 97 == 0:
            seldom.apply(state.since(seldom.version))
    seldom.apply(state.since(seldom.version))
    late = Mirror()
    late.apply(state.since(None))
    assert always.rows == seldom.rows == late.rows
    assert always.parts == seldom.parts == late.parts
    assert late.entries == sorted(late.entries, key=lambda entry: entry["n"])
    assert late.entries[-5:] == always.entries[-5:] == seldom.entries[-5:]
    assert state.since(always.version) is None


def test_10000_steps_stay_light_and_a_step_costs_a_few_hundred_bytes() -> None:
    state = state_of(*pageevents.run(10_000, lost_after=300))
    found = state.since(None)
    assert found is not None
    assert MAX_ROWS / 2 <= len(found["curve"]["rows"]) <= MAX_ROWS
    assert len(json.dumps(found)) < 300_000
    version = state.version
    state.apply(typed(next(e for e in pageevents.run(1) if e["event"] == "step")))
    assert len(json.dumps(state.since(version))) < 4000


@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=200),
    st.integers(2, 20),
)
def test_a_curve_keeps_its_ends_its_extremes_and_its_mean(
    losses: list[float | None], limit: int
) -> None:
    series = Curve(limit)
    for step, loss in enumerate(losses, 1):
        series.add(Row(1, step, step / 4, loss, loss, loss, 10.0, version=step))
    found = series.since(-1)
    assert found is not None
    rows = found["rows"]
    assert len(rows) <= limit
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert rows[-1][0] == len(losses)
    finite = [loss for loss in losses if loss is not None]
    lows = [row[3] for row in rows if row[3] is not None]
    highs = [row[4] for row in rows if row[4] is not None]
    if finite:
        assert min(lows) == pytest.approx(min(finite), rel=1e-5)
        assert max(highs) == pytest.approx(max(finite), rel=1e-5)
    assert all(row[5] == 10.0 for row in rows)


def test_a_killed_stage_is_lost_until_the_next_generation_runs() -> None:
    begun = [event for event in pageevents.run(8) if event["event"] not in ("summary", "end")]
    state = state_of(*begun)
    assert set(health(state).values()) == {"running"}

    state.apply(typed(pageevents.fault(8, "coarse")))
    assert health(state)["coarse"] == "lost"
    assert health(state)["fine"] == "running"
    assert part(state, "progress")["status"] == "recovering"
    assert part(state, "progress")["faults"] == [8]

    state.apply(typed(pageevents.vitals(8, generation=1)))  # sent before the loss was noticed
    assert health(state)["coarse"] == "lost"
    state.apply(typed(pageevents.vitals(8, generation=2, coarse="building")))
    assert health(state)["coarse"] == "building"
    state.apply(typed({"event": "generation", "generation": 2, "step": 8, "workers": {}}))
    assert set(health(state).values()) == {"running"}
    assert part(state, "progress")["status"] == "training"
    assert part(state, "progress")["generation"] == 2


def test_stages_that_join_and_leave_come_and_go() -> None:
    begun = [event for event in pageevents.run(8) if event["event"] not in ("summary", "end")]
    state = state_of(*begun)
    assert "coarse" in health(state)
    graph = {"stages": [{"name": "new", "index": 0, "inputs": ["input"], "device": "cpu"}]}
    workers = [{"label": "new", "stage": "new", "stage_index": 7, "replica": 0, "address": "h:1"}]
    state.apply(typed({"event": "stages", "step": 8, "graph": graph, "workers": workers}))
    assert set(health(state)) == {"driver", "new"}
    assert [stage["name"] for stage in part(state, "run")["graph"]["stages"]] == ["new"]
    assert part(state, "run")["name"]


def test_lost_stage_stays_lost_after_a_step_of_its_generation() -> None:
    *begun, step = [event for event in pageevents.run(9) if event["event"] in ("run", "step")]
    state = state_of(*begun, pageevents.fault(8, "lift:1"))
    state.apply(typed(step))
    assert health(state)["lift:1"] == "lost"
    assert health(state)["lift:0"] == "running"
    state.apply(typed({**step, "step": 10, "generation": 2}))
    assert health(state)["lift:1"] == "running"


def test_a_fault_of_a_stage_with_replicas_may_name_the_stage_alone() -> None:
    state = state_of(next(pageevents.run(1)), pageevents.fault(1, "lift"))
    assert [label for label, state in health(state).items() if state == "lost"] == [
        "lift:0",
        "lift:1",
    ]


@pytest.mark.parametrize("outcome", ["done", "failed", "interrupted"])
def test_all_stages_except_lost_ones_have_ended_after_the_run(outcome: str) -> None:
    begin = next(pageevents.run(1))
    end = {"event": "end", "outcome": outcome, "error": "why"}
    state = state_of(begin, pageevents.fault(1, "finish"), end)
    assert part(state, "progress")["status"] == outcome
    assert part(state, "progress")["error"] == "why"
    assert health(state)["finish"] == "lost"
    assert health(state)["fine"] == "ended"


def test_driver_is_shown_as_a_worker_if_vitals_contain_it() -> None:
    state = state_of(next(pageevents.run(1)), pageevents.vitals(1))
    assert health(state)["driver"] == "running"


def test_entries_of_one_kind_do_not_displace_another_kind() -> None:
    state = state_of(pageevents.fault(1))
    for number in range(5 * MAX_ENTRIES):
        state.apply(
            typed({"event": "log", "level": "WARNING", "logger": "x", "text": f"line {number}"})
        )
    found = state.since(None)
    assert found is not None
    assert len(found["entries"]) == MAX_ENTRIES + 1
    assert found["entries"][0]["kind"] == "fault"
    assert found["parts"]["counts"] == {"fault": 1, "message": 5 * MAX_ENTRIES}


def test_state_keeps_every_other_evaluation_and_the_newest_if_there_are_too_many() -> None:
    def evaluated(count: int) -> list[int]:
        state = state_of(*({"event": "eval", "step": n, "loss": 1.0} for n in range(count)))
        return [step for step, *_ in part(state, "evaluations")]

    assert evaluated(EVALUATIONS) == list(range(EVALUATIONS))
    assert evaluated(EVALUATIONS + 1) == list(range(0, EVALUATIONS + 1, 2))


def test_state_contains_no_number_that_is_not_finite() -> None:
    step = next(event for event in pageevents.run(1) if event["event"] == "step")
    state = state_of(
        {**step, "loss": math.nan, "learning_rate": math.inf},
        {"event": "eval", "step": 1, "epoch": 1, "loss": math.inf, "f1": math.nan},
    )
    json.dumps(state.since(None), allow_nan=False)
    assert part(state, "evaluations") == [[1, 0.0, {"loss": None, "f1": None}]]


def test_state_contains_the_learning_rates_of_all_groups() -> None:
    step = next(event for event in pageevents.run(1) if event["event"] == "step")
    assert part(state_of(step), "progress")["learning_rates"] == [0.003]
    groups = {"lift:0": [0.003, math.inf, 0.03], "finish": [0.5, 0.25]}
    several = state_of({**step, "group_learning_rates": groups})
    assert part(several, "progress")["learning_rates"] == [0.003, 0.03]


def test_an_event_that_the_page_does_not_show_changes_nothing() -> None:
    state = state_of(next(pageevents.run(1)))
    version = state.version
    state.apply(KeptEvent(path="runs/job-1", time=1.0))
    assert state.since(version) is None


def test_entries_have_the_wording_of_the_terminal() -> None:
    fault = {"event": "fault", "step": 3, "error": "gone", "stage": "b", "time": 1.0}
    message = state_of(fault, {"event": "vitals", "step": 3}).since(None)
    assert message is not None
    (entry,) = message["entries"]
    shown: list[str] = []
    progress_output.plain(shown.append)(typed(fault))
    assert [entry["text"]] == shown == ["lost after step 3: gone"]
    assert (entry["kind"], entry["level"], entry["stage"]) == ("fault", "error", "b")


def test_timeline_times_count_from_its_start() -> None:
    shown = part(state_of(pageevents.timeline(8)), "timeline")
    first = shown["stages"][0]
    assert first["spans"][0] == ["F", 0, 0, 9500]
    assert all(item[-2] >= 0 for stage in shown["stages"] for item in stage["spans"])


def test_open_page_gets_a_timeline_at_once() -> None:
    state = state_of(*pageevents.run(1))
    known = state.version
    state.apply(typed(pageevents.timeline(8)))
    message = state.since(known)
    assert message is not None
    assert set(message["parts"]) == {"timeline"}


def test_report_is_one_file_and_escapes_the_texts_of_a_run() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    events = [*pageevents.run(20), {"event": "warning", "text": hostile}]
    page = html([pageevents.record("<!--<script>", events)])
    assert "</script><script>alert" not in page
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    (run,) = json.loads(data)["runs"]
    assert run["name"] == "<!--<script>"
    assert run["state"]["entries"][-1]["text"] == f"warning: {hostile}"
    for outside in ("src=", 'rel="stylesheet"', "import {", "export {", 'href="icon.svg'):
        assert outside not in page.replace("data.src", "")
