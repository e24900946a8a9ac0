"""The properties of a host that affect the bits of results."""

from __future__ import annotations

import torch

from rpcmp.pipelining import devices


def test_facts_name_torch_and_threads() -> None:
    facts = devices.host_facts()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads())
    assert facts["CPU capability"]
    assert facts["device"] == "cpu"
    assert devices.host_facts(torch.device("cuda", 1))["device"] == "cuda:1"


def test_differences_name_stage_and_fact() -> None:
    reference = {"torch": "2.13.0", "threads": "1"}
    other = {**reference, "threads": "4"}
    assert devices.host_differences(reference, {"a": reference}) == []
    found = devices.host_differences(reference, {"a": reference, "b": other})
    assert found == ["threads is 4 at stage 'b' and 1 in the reference"]
