"""Which device a config's name stands for."""

from __future__ import annotations

import pytest
import torch

from rpcmp import devices
from rpcmp.page.state import State
from tests.support.processes import JobFolder, rpcmp


@pytest.mark.parametrize(("has_cuda", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_cuda_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert devices.resolve("auto") == torch.device(expected)


def test_other_names_are_torchs() -> None:
    assert devices.resolve("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="gpu"):
        devices.resolve("gpu")


def test_a_run_tells_which_device_auto_was(job: JobFolder) -> None:
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
        page.take(event)
    found = torch.empty(0, device=devices.resolve("auto")).device
    places = result.event("generation")["workers"]
    assert {label: place["device"] for label, place in places.items()} == {
        "stage0": str(found),
        "stage1": "cpu",
    }
    everything = page.since(None)
    assert everything is not None
    shown = {one["label"]: one["device"] for one in everything["parts"]["workers"]}
    assert {label: shown[label] for label in places} == {"stage0": str(found), "stage1": "cpu"}
