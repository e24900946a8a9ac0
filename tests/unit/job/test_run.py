"""What is told of a run before anything else, and the stamp on all that follows."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from typing import Any

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.job.run import run_event

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
def told() -> dict[str, Any]:
    addresses = ["a:1", "b:2", "c:3", "d:4"]
    found: dict[str, Any] = json.loads(
        json.dumps(run_event(parse_config(TOWERS), "4711", addresses).to_json())
    )
    return found


def test_a_run_says_what_it_is(told: dict[str, Any]) -> None:
    assert (told["event"], told["name"], told["job_id"]) == ("run", "towers", "4711")
    assert (told["driver"], told["pid"]) == (platform.node(), os.getpid())
    assert told["versions"]["torch"] == metadata.version("torch")
    assert told["config"]["optimizer"]["kwargs"]["lr"] == 0.5


def test_what_was_given_in_confidence_is_not_told(told: dict[str, Any]) -> None:
    assert told["config"]["optimizer"]["kwargs"]["token"].startswith("sha256:")
    assert "hush" not in json.dumps(told)


def test_stages_are_in_the_order_of_the_graph(told: dict[str, Any]) -> None:
    assert told["graph"]["stages"] == [
        {
            "name": "left",
            "index": 1,
            "inputs": ["input"],
            "replicas": 1,
            "device": "cpu",
            "schedule_row": 0,
        },
        {
            "name": "right",
            "index": 2,
            "inputs": ["input.image"],
            "replicas": 2,
            "device": "cpu",
            "schedule_row": 1,
        },
        {
            "name": "top",
            "index": 0,
            "inputs": ["left", "right.skip"],
            "replicas": 1,
            "device": "cuda:0",
            "schedule_row": 2,
        },
    ]


def test_workers_are_in_the_order_of_the_config(told: dict[str, Any]) -> None:
    found = [(worker["label"], worker["replica"], worker["address"]) for worker in told["workers"]]
    assert found == [
        ("top", 0, "a:1"),
        ("left", 0, "b:2"),
        ("right:0", 0, "c:3"),
        ("right:1", 1, "d:4"),
    ]


def test_servers_that_are_yet_to_be_started_have_no_address() -> None:
    told = run_event(parse_config(TOWERS), "4711", [])
    assert [worker["address"] for worker in told.workers] == [""] * 4
