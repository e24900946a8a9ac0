"""The wording of events, which the terminal, the page and reports share."""

from __future__ import annotations

from typing import Any

import pytest

from rpcmp.observability.events import EVENTS
from rpcmp.observability.events.wording import RunContext, describe, describe_details
from tests.support.runevents import typed

RUN = {
    "event": "run",
    "name": "digits",
    "config": {"schedule": "1f1b", "recovery": {"give_up_after": 600.0}},
    "graph": {"stages": []},
    "workers": [
        {"label": "a", "stage": "a", "stage_index": 0, "replica": 0},
        {"label": "b:1", "stage": "b", "stage_index": 1, "replica": 1},
    ],
}
STEP = {"event": "step", "step": 1, "epoch": 1, "loss": 2.5, "samples_per_s": 1234.5}
SUMMARY = {"event": "summary", "steps": 40, "loss": 0.125, "metrics": {"f1": 0.75}}
STOP = {"event": "early_stop", "step": 9, "metric": "f1", "best_step": 6}

MOVES = {
    "step": 7,
    "balance": [1, 3],
    "before": [2, 2],
    "reason": "b is slower",
    "seconds": 2.5,
}

LINES: list[tuple[dict[str, Any], str]] = [
    ({"event": "ui", "url": "http://here"}, "page: http://here"),
    ({"event": "measuring"}, "measuring the hosts before the first step"),
    (
        {"event": "plan", "balance": [1, 2], "step_s": 0.25, "bubble": 0.1, "is_rehearsed": True},
        "balance = [1, 2]  predicted: step 250.0 ms  bubble 10%",
    ),
    (
        {"event": "plan", "balance": [1, 2], "step_s": 2.5, "bubble": 0.1, "is_rehearsed": False},
        "balance = [1, 2]  predicted: step 2,500.0 ms, without messages and loading  bubble 10%",
    ),
    (
        {"event": "shares", "shares": {"a": [1, 2], "b": [1, 1]}},
        "replicas share micro-batches: a 1:2, b 1:1",
    ),
    ({"event": "generation", "generation": 2, "step": 3}, "generation 2 starts after step 3"),
    ({"event": "start", "steps": 40}, "digits: 40 steps, 1f1b, stages a, b:1"),
    (
        {**STEP, "data_share": 0.02, "busy": {"a": 0.25, "b": 0.5}},
        "step 1/40  epoch 1  loss 2.5000  1,234 samples/s  busy 25% 50%  data 2%",
    ),
    (
        {
            "event": "schedule",
            "step": 30,
            "chosen": "zero-bubble, 4 a message",
            "schedule": "zero-bubble",
            "microbatches_per_message": 4,
            "measured": {"1f1b": 0.02, "zero-bubble, 4 a message": 0.0125, "zero-bubble": 0.019},
        },
        "schedule: zero-bubble, 4 a message 12.5 ms a step; "
        "tried: 1f1b 20.0 ms, zero-bubble 19.0 ms",
    ),
    (
        {"event": "schedule", "step": 0, "chosen": "1f1b, 2 a message", "measured": {}},
        "schedule: starts with 1f1b, 2 a message",
    ),
    (
        {"event": "eval", "step": 3, "epoch": 1, "loss": 0.5, "f1": None},
        "evaluation after step 3: loss 0.5000, f1 nan",
    ),
    ({**STOP, "best": None, "waited": 1}, "stopped early after step 9: f1 was NaN in 1 evaluation"),
    (
        {**STOP, "best": 0.5, "waited": 3},
        "stopped early after step 9: 3 evaluations in a row brought nothing better than "
        "f1 0.5000 after step 6",
    ),
    ({"event": "report", "text": "all is well"}, "all is well"),
    (
        {"event": "checkpoint", "step": 3, "path": "c", "seconds": 0.5, "bytes": 2**20},
        "checkpoint of step 3 in c: 1.0 MiB in 0.5 s",
    ),
    (
        {"event": "best", "step": 3, "metric": "loss", "value": 0.25},
        "the best so far is kept: step 3, loss 0.2500",
    ),
    ({"event": "fault", "step": 3, "error": "gone"}, "lost after step 3: gone"),
    (
        {"event": "recovered", "generation": 2, "step": 3, "seconds": 1.25},
        "continuing after step 3 as generation 2, after 1.2 s",
    ),
    (
        {"event": "waiting", "stage": "a", "address": "h:1"},
        "waiting up to 600 s for the server of stage 'a' at h:1: restart it with the options "
        "that it had, such as `rpcmp serve --stage 0`",
    ),
    (
        {"event": "waiting", "stage": "b:1", "address": "h:2"},
        "waiting up to 600 s for the server of stage 'b:1' at h:2: restart it with the "
        "options that it had, such as `rpcmp serve --stage 1 --replica 1`",
    ),
    (
        {"event": "replaced", "stage": "b", "lost": "h:1", "address": "s:1"},
        "the spare at s:1 takes stage 'b', whose server at h:1 is gone",
    ),
    (
        {"event": "stages", "step": 7, "graph": {"stages": [{"name": "a"}, {"name": "c"}]}},
        "the stages are now a, c",
    ),
    (
        {"event": "rebalance", "outcome": "moved", **MOVES},
        "layers have moved in 2.5 s: balance = [1, 3] instead of [2, 2]: b is slower",
    ),
    (
        {"event": "rebalance", "outcome": "undone", **MOVES},
        "balance = [1, 3] is back, after 2.5 s: b is slower",
    ),
    (
        {"event": "rebalance", "outcome": "suggested", **MOVES},
        "warning: b is slower with balance = [1, 3] instead of [2, 2]: give "
        "`--set 'model.balance=[1,3]'` to the next run: this one has no [checkpoint] to go on from",
    ),
    (
        {"event": "resumed", "step": 3, "run": "r", "changed": ["seed"]},
        "resuming after step 3 (changed since: seed)",
    ),
    (
        {"event": "resumed", "step": 0, "changed": []},
        "no checkpoint to resume from: starting from the beginning",
    ),
    ({"event": "warning", "text": "mind this"}, "warning: mind this"),
    ({"event": "log", "logger": "a.b", "text": "oh", "count": 3}, "a.b: oh (x 3)"),
    (
        {**SUMMARY, "skipped_steps": 2},
        "done: 40 steps (2 skipped), loss 2.5000 -> 0.1250, test f1 0.7500",
    ),
    ({"event": "kept", "path": "/runs/one"}, "kept in /runs/one"),
    (
        {"event": "end", "outcome": "failed", "error": "out of memory"},
        "the run has ended, failed: out of memory",
    ),
    ({"event": "end", "outcome": "done"}, "the run has ended, done"),
]


@pytest.fixture
def run() -> RunContext:
    context = RunContext()
    for data in (RUN, {"event": "start", "steps": 40}, STEP):
        context.add(typed(data))
    return context


@pytest.mark.parametrize(("data", "line"), LINES, ids=[line[:20] for _, line in LINES])
def test_an_event_is_a_line(run: RunContext, data: dict[str, Any], line: str) -> None:
    assert describe(typed(data), run) == line


def test_events_other_than_those_for_programs_have_a_wording(run: RunContext) -> None:
    assert set(EVENTS) - {data["event"] for data, _ in LINES} == {"run", "vitals", "timeline"}
    assert describe(typed(RUN), run) == ""


def test_a_summary_has_details() -> None:
    summary = {
        **SUMMARY,
        "memory": {"a": {"idle": 2**20, "peak": 3 * 2**20}},
        "best": {"step": 6, "metric": "f1", "value": 0.5, "path": "saved/step-6"},
        "plan": {
            "balance": [1, 2],
            "predicted_step_s": 0.25,
            "measured_step_s": 0.5,
            "wrong": "a computes 400.0 ms a step, not 200.0",
        },
        "parameters_sha256": "abc",
    }
    assert list(describe_details(typed(summary))) == [
        "best step 6, f1 0.5000, in saved/step-6",
        "peak memory a 3 MiB (idle 1)",
        "balance = [1, 2]: predicted step 250.0 ms, measured 500.0 ms (median); "
        "a computes 400.0 ms a step, not 200.0",
        "parameters sha256 abc",
    ]


def test_a_plan_has_a_line_for_each_stage() -> None:
    times = {"busy_s": 0.2, "messages_s": 0.01, "bubble": 0.1}
    stage = {"num_layers": 2, **times, "memory_bytes": 2**20}
    plan = {
        "event": "plan",
        "is_rehearsed": True,
        "stages": {"a": {**stage, "limit_bytes": 2**30}, "long": {**stage, "limit_bytes": None}},
    }
    assert list(describe_details(typed(plan))) == [
        "  a     2 layers  computes 200.0 ms  messages 10.0 ms  bubble 10%  memory 1.0 MiB of "
        "1.0 GiB",
        "  long  2 layers  computes 200.0 ms  messages 10.0 ms  bubble 10%  memory 1.0 MiB",
    ]
    assert "messages" not in "".join(describe_details(typed({**plan, "is_rehearsed": False})))


def test_a_run_with_checkpoints_can_go_on_with_what_is_suggested() -> None:
    run, config = RunContext(), {"checkpoint": {"every_steps": 5}}
    run.add(typed({**RUN, "config": config}))
    line = describe(typed({"event": "rebalance", "outcome": "suggested", **MOVES}), run)
    assert line.endswith("stop the run, and go on with `--resume --set 'model.balance=[1,3]'`")
