"""The devices that a run reports."""

from __future__ import annotations

import torch

from rpcmp.observability.dashboard.state import State
from rpcmp.pipelining import devices
from tests.support.processes import JobFolder, rpcmp
from tests.support.runevents import typed


def test_a_run_reports_the_device_that_auto_chose(job: JobFolder) -> None:
    config = job.config("""
        [model]
        layers = "zoo:mlp"
        [[stages]]
        device = "auto"
        [[stages]]
    """)
    result = rpcmp("drive", config, "--json")
    assert result.code == 0, result.err
    page = State()
    for event in result.events:
        page.apply(typed(event))
    found = torch.empty(0, device=devices.resolve_device("auto")).device
    places = result.event("generation")["workers"]
    assert {label: place["device"] for label, place in places.items()} == {
        "stage0": str(found),
        "stage1": "cpu",
    }
    everything = page.since(None)
    assert everything is not None
    shown = {one["label"]: one["device"] for one in everything["parts"]["workers"]}
    assert {label: shown[label] for label in places} == {"stage0": str(found), "stage1": "cpu"}
