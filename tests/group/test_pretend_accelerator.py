"""The pretend accelerator is as strict as a real one, and computes the CPU's bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.forkedcall import in_a_fork

pytestmark = [pytest.mark.usefixtures("pretended"), pytest.mark.xdist_group("pretend")]


def failure(act: Callable[[], object]) -> str | None:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def trained(device: str) -> dict[str, Tensor]:
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
    assert model[4].tied is model[0].weight
    assert str(model[0].weight.device) == device
    return {name: value.cpu() for name, value in model.state_dict().items()}


def devices_and_memory() -> dict[str, Any]:
    """Return what a process finds that has the accelerator; runs in a fork."""
    pretend: Any = torch.get_device_module("pretend")
    found: dict[str, Any] = {"unused": pretend.is_initialized()}
    found["devices"] = [str(torch.accelerator.current_accelerator()), pretend.device_count()]
    os.environ["PRETEND_VISIBLE_DEVICES"] = "0,3"
    found["visible"] = type(pretend)().device_count()
    one, other = trained("cpu"), trained("pretend:2")
    found["equal"] = all(torch.equal(one[name], other[name]) for name in one)
    here: Any = torch.ones(256, device="pretend:1")
    on_host, elsewhere = torch.ones(256), torch.ones(256, device="pretend:2")
    found["used"] = [pretend.memory_allocated(index) for index in (0, 1, 3)]
    found["mixed"] = [failure(lambda: here + on_host), failure(lambda: here + elsewhere)]
    found["absent"] = failure(lambda: torch.ones(1, device="pretend:4"))
    found["full"] = failure(lambda: torch.empty(2**29, device="pretend:3"))
    view: Tensor | None = here[:2]
    here = None
    found["viewed"] = pretend.memory_allocated(1)
    view = None  # noqa: F841
    found["freed"] = [pretend.memory_allocated(1), pretend.max_memory_allocated(1) >= 1024]
    made = torch.tensor([2.0, 3.0], device="pretend:1", requires_grad=True)
    found["made"] = [
        str(made.device),
        made.is_leaf,
        made.requires_grad,
        made.detach().cpu().tolist(),
    ]
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.write(write, str(failure(lambda: torch.ones(1, device="pretend:0"))).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    found["forked"] = os.read(read, 1000).decode()
    pretend.lose()
    lost = [lambda: torch.ones(1, device="pretend:1"), lambda: elsewhere + 1]
    found["lost"] = [failure(each) for each in lost]
    return found


def test_devices_have_the_bits_of_the_cpu_and_memory_that_ends() -> None:
    found = in_a_fork(devices_and_memory)
    same = "RuntimeError: Expected all tensors to be on the same device, but found at least two"
    mixed, mixed_devices = found.pop("mixed")
    assert mixed.startswith(f"{same} devices, cpu and pretend:1!")
    assert mixed_devices.startswith(f"{same} devices, pretend:1 and pretend:2!")
    begins = {
        "full": "OutOfMemoryError: pretend out of memory. Tried to allocate",
        "forked": "RuntimeError: Cannot re-initialize the pretend accelerator",
    }
    assert {name: found.pop(name)[: len(text)] for name, text in begins.items()} == begins
    assert [each.partition(" is lost")[0] for each in found.pop("lost")] == [
        "AcceleratorError: pretend error: pretend:1",
        "AcceleratorError: pretend error: pretend:2",
    ]
    assert found == {
        "unused": False,
        "devices": ["pretend", 4],
        "visible": 2,
        "equal": True,
        "used": [0, 1024, 0],
        "absent": "RuntimeError: invalid device ordinal: pretend:4",
        "viewed": 1024,
        "freed": [0, True],
        "made": ["pretend:1", True, True, [2.0, 3.0]],
    }


def streams_and_copies() -> dict[str, Any]:
    """Return what a process finds that uses two streams; runs in a fork."""
    counts = torch.get_device_module("pretend").streams.counts
    before = counts.total()
    torch.ones(1, device="pretend:0").item()
    torch.ones(1, device="pretend:0").cpu()
    torch.ones(1).to("pretend:0")
    found: dict[str, Any] = {"reads": counts.total() - before}
    stream = torch.Stream(device="pretend:1")
    with stream:
        found["stream"] = torch.accelerator.current_stream(1) == stream
    event = torch.Event(device="pretend:1")
    current = torch.accelerator.current_stream(1)
    pinned = torch.ones(3, pin_memory=True)
    found["pinned"] = [pinned.is_pinned(), pinned[1:].is_pinned(), torch.ones(3).is_pinned()]

    def sent() -> Tensor:
        with stream:
            there = torch.empty(3, device="pretend:1")
            there.copy_(pinned, non_blocking=True)
            event.record(stream)
        return there

    def free_early() -> None:
        there = sent()
        current.wait_event(event)
        _ = there + 1
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

    def fetch() -> None:
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
    return found


def test_streams_have_no_order_but_that_of_events_and_copies_come_late() -> None:
    race = "RuntimeError: a race on the pretend accelerator: on stream"
    assert in_a_fork(streams_and_copies) == {
        "reads": 3,  # waits of the host
        "stream": True,
        "pinned": [True, True, False],
        "races": [
            f"{race} (1, 0), aten.add.Tensor reads what stream (1, 1) still uses",
            f"{race} (1, 1), memory is freed that stream (1, 0) still uses",
            f"{race} (1, 1), aten.copy_.default reads what stream (1, 0) still uses",
            None,  # the host has waited
        ],
        "late": [True, [2.0, 2.0, 2.0]],
    }
