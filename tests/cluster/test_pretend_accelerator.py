"""The pretend accelerator is as strict as a real one, and computes the CPU's bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.pretend import install

ASKS = """
import json, os, torch
from torch import nn

found = {}

def failure(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

found["devices"] = [str(torch.accelerator.current_accelerator()), torch.accelerator.device_count()]
found["unused"] = torch.pretend.is_initialized()

def trained(device):
    torch.manual_seed(1)
    layers = nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Dropout(), nn.Flatten(), nn.Linear(9, 1)
    model = nn.Sequential(*layers).to(device)
    model[4].tied = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(5, 2, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs.to(device)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    assert model[4].tied is model[0].weight and str(model[0].weight.device) == device
    return {name: value.cpu() for name, value in model.state_dict().items()}

one, other = trained("cpu"), trained("pretend:2")
found["equal"] = all(torch.equal(one[name], other[name]) for name in one)

here = torch.ones(256, device="pretend:1")
found["used"] = [torch.accelerator.device_count(), *map(torch.pretend.memory_allocated, range(4))]
found["mixed"] = failure(lambda: here + torch.ones(256))
found["mixed_devices"] = failure(lambda: here + torch.ones(256, device="pretend:2"))
found["absent"] = failure(lambda: torch.ones(1, device="pretend:4"))
found["full"] = failure(lambda: torch.empty(2**29, device="pretend:3"))
view, here = here[:2], None
found["viewed"] = torch.pretend.memory_allocated(1)
view, stays = None, torch.ones(1, device="pretend:2")
found["freed"] = [torch.pretend.memory_allocated(1), torch.pretend.max_memory_allocated(1) >= 1024]

made = torch.tensor([2.0, 3.0], device="pretend:1", requires_grad=True)
found["made"] = [str(made.device), made.is_leaf, made.requires_grad, made.detach().cpu().tolist()]

streams = torch.pretend.streams
before = streams.counts.total()
torch.ones(1, device="pretend:0").item()
torch.ones(1, device="pretend:0").cpu()
torch.ones(1).to("pretend:0")
found["reads"] = streams.counts.total() - before

stream = torch.Stream(device="pretend:1")
with stream:
    found["stream"] = torch.accelerator.current_stream(1) == stream
event = torch.Event(device="pretend:1")
current = torch.accelerator.current_stream(1)

pinned = torch.ones(3, pin_memory=True)
found["pinned"] = [pinned.is_pinned(), pinned[1:].is_pinned(), torch.ones(3).is_pinned()]

def sent():
    with stream:
        there = torch.empty(3, device="pretend:1")
        there.copy_(pinned, non_blocking=True)
        event.record(stream)
    return there

def free_early():
    there = sent()
    current.wait_event(event)
    there + 1
    del there
    torch.ones(1, device="pretend:1")

found["races"] = [failure(lambda: sent() + 1), failure(free_early)]
there = sent()
current.wait_event(event)
twice = there + there
there.record_stream(current)
del there
back = torch.empty(3, pin_memory=True)
event.record(current)

def fetch():
    with stream:
        back.copy_(twice, non_blocking=True)
        event.record(stream)

found["races"] += [failure(fetch)]
stream.wait_event(event)
fetch()
found["late"] = [bool(back.isnan().all())]
event.synchronize()
found["late"] += [back.tolist()]
found["races"] += [failure(lambda: twice.zero_())]
torch.accelerator.synchronize(1)

def lost():
    torch.pretend.lose()
    torch.ones(1, device="pretend:1")

read, write = os.pipe()
if not (pid := os.fork()):
    os.write(write, failure(lambda: torch.ones(1, device="pretend:0")).encode())
    os._exit(0)
os.waitpid(pid, 0)
found["forked"] = os.read(read, 1000).decode()
found["lost"] = [failure(lost), failure(lambda: stays + 1)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of a process that has the accelerator."""
    environment = {**os.environ, **install(tmp_path_factory.mktemp("pretend"))}
    return answers(environment)


def answers(environment: dict[str, str]) -> dict[str, Any]:
    asked = subprocess.run(
        [sys.executable, "-c", ASKS], env=environment, capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    found: dict[str, Any] = json.loads(asked.stdout)
    return found


def test_it_has_four_devices_and_the_bits_of_the_cpu(found: dict[str, Any]) -> None:
    assert found["devices"] == ["pretend", 4]
    assert found["unused"] is False
    assert found["equal"] is True


def test_tensors_are_made_of_data(found: dict[str, Any]) -> None:
    assert found["made"] == ["pretend:1", True, True, [2.0, 3.0]]


def test_an_operation_on_two_devices_raises(found: dict[str, Any]) -> None:
    same = "RuntimeError: Expected all tensors to be on the same device, but found at least two"
    assert found["mixed"].startswith(f"{same} devices, cpu and pretend:1!")
    assert found["mixed_devices"].startswith(f"{same} devices, pretend:1 and pretend:2!")


def test_a_device_that_does_not_exist_raises(found: dict[str, Any]) -> None:
    assert found["absent"] == "RuntimeError: invalid device ordinal: pretend:4"


def test_memory_is_counted_and_ends(found: dict[str, Any]) -> None:
    assert found["used"] == [4, 0, 1024, 0, 0]
    assert found["viewed"] == 1024
    assert found["freed"] == [0, True]
    assert found["full"].startswith("OutOfMemoryError: pretend out of memory. Tried to allocate")


def test_waits_of_the_host_are_counted(found: dict[str, Any]) -> None:
    assert found["reads"] == 3
    assert found["stream"] is True


def test_streams_have_no_order_but_that_of_events(found: dict[str, Any]) -> None:
    read_too_early, freed, fetched, written = found["races"]
    race = "RuntimeError: a race on the pretend accelerator: on stream"
    assert read_too_early == f"{race} (1, 0), aten.add.Tensor reads what stream (1, 1) still uses"
    assert freed == f"{race} (1, 1), memory is freed that stream (1, 0) still uses"
    assert fetched == f"{race} (1, 1), aten.copy_.default reads what stream (1, 0) still uses"
    assert written is None  # the host has waited


def test_a_copy_to_pinned_memory_comes_late(found: dict[str, Any]) -> None:
    assert found["pinned"] == [True, True, False]
    assert found["late"] == [True, [2.0, 2.0, 2.0]]


def test_a_fork_of_a_process_that_used_it_cannot(found: dict[str, Any]) -> None:
    assert found["forked"].startswith("RuntimeError: Cannot re-initialize the pretend accelerator")


def test_a_lost_device_fails_in_every_later_call(found: dict[str, Any]) -> None:
    assert [each.partition(" is lost")[0] for each in found["lost"]] == [
        "AcceleratorError: pretend error: pretend:1",
        "AcceleratorError: pretend error: pretend:2",
    ]


def test_fewer_devices_may_be_visible(tmp_path: Path) -> None:
    environment = {**os.environ, **install(tmp_path), "PRETEND_VISIBLE_DEVICES": "0,3"}
    asked = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.accelerator.device_count())"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.strip() == "2"
