"""The event `run`, and the stamp on all events."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import Any

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.job.cuts import with_stages
from rpcmp.job.server_pool import ServerPlace
from rpcmp.job.stage_events import run_event, stages_event
from tests.support.graphs import chain_of

PLACES = [
    ServerPlace(address, index)
    for address, index in (("a:1", 0), ("b:2", 1), ("c:3", 2), ("d:4", 2))
]

TOWERS = {
    "name": "towers",
    "loss": "torch.nn:MSELoss",
    "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.5, "token": "hush"}},
    "stages": [
        {"name": "top", "module": "m:Top", "inputs": ["left", "right.skip"], "device": "cuda:0"},
        {"name": "left", "module": "m:Left", "inputs": ["input"]},
        {"name": "right", "module": "m:Right", "inputs": ["input.image"], "replicas": 2},
    ],
}


@pytest.fixture
def event() -> dict[str, Any]:
    sent = run_event(parse_config(TOWERS), "4711", PLACES)
    received: dict[str, Any] = json.loads(json.dumps(sent.to_json()))
    return received


def test_the_run_event_describes_the_job(event: dict[str, Any]) -> None:
    assert (event["event"], event["name"], event["job_id"]) == ("run", "towers", "4711")
    assert (event["driver"], event["pid"]) == (platform.node(), os.getpid())
    assert event["versions"]["torch"] == metadata.version("torch")
    assert event["config"]["optimizer"]["kwargs"]["lr"] == 0.5


def test_the_run_event_redacts_secrets(event: dict[str, Any]) -> None:
    assert event["config"]["optimizer"]["kwargs"]["token"].startswith("sha256:")
    assert "hush" not in json.dumps(event)


def test_stages_are_in_the_order_of_the_graph(event: dict[str, Any]) -> None:
    keys = ("name", "index", "inputs", "replicas", "device", "schedule_row")
    rows = [
        ("left", 1, ["input"], 1, "cpu", 0),
        ("right", 2, ["input.image"], 2, "cpu", 1),
        ("top", 0, ["left", "right.skip"], 1, "cuda:0", 2),
    ]
    assert event["graph"]["stages"] == [dict(zip(keys, row, strict=True)) for row in rows]


def test_workers_are_in_the_order_of_the_config(event: dict[str, Any]) -> None:
    found = [(worker["label"], worker["replica"], worker["address"]) for worker in event["workers"]]
    assert found == [
        ("top", 0, "a:1"),
        ("left", 0, "b:2"),
        ("right:0", 0, "c:3"),
        ("right:1", 1, "d:4"),
    ]


def test_workers_have_no_address_before_their_servers_are_started() -> None:
    event = run_event(parse_config(TOWERS), "4711", [])
    assert [worker["address"] for worker in event.workers] == [""] * 4


def test_a_worker_keeps_its_servers_number_when_other_stages_have_gone() -> None:
    model = {"layers": "m:layers", "balance": [2, 1, 1]}
    config = chain_of(3, model=model, rebalance="auto")
    left = with_stages(config, {"stage1": 1, "stage3": 3})
    event = stages_event(left, [ServerPlace("b:2", 1), ServerPlace("d:4", 3)], 7)
    assert [(stage["name"], stage["index"]) for stage in event.graph["stages"]] == [
        ("stage1", 0),
        ("stage3", 1),
    ]
    assert [worker["stage_index"] for worker in event.workers] == [1, 3]
