"""Copies between a device and the host: on the pretend accelerator, in forks that have it.

See tests/support/pretend. A piece of code without its waits has to fail there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcmp.pipelining.devices import CPU
from rpcmp.rpc.memory_blocks import PeerMemory
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor
from rpcmp.worker import copies
from rpcmp.worker.copies import Copies, copies_of
from tests.support.forkedcall import in_a_fork

pytestmark = pytest.mark.xdist_group("pretend")
on_a_device = pytest.mark.usefixtures("pretended")


def take_out(piece: str, instead: str) -> None:
    """Let the copies of this process be made by code without a piece, if there is one."""
    source = Path(copies.__file__).read_text(encoding="utf-8")
    if piece:
        assert source.count(piece) == 1
        exec(compile(source.replace(piece, instead), copies.__file__, "exec"), vars(copies))


def failure(act: Callable[[], object]) -> str | None:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def copied(taken_out: str = "", instead: str = "") -> dict[str, Any]:
    """Copy there and back, in this process, on a device of 1 MiB; return what was found."""
    take_out(taken_out, instead)
    sys.modules["pretend_accelerator"].MEMORY = 2**20  # type: ignore[attr-defined]
    device = torch.device("pretend:1")
    made: Any = copies.copies_of(device)
    threads, results = set[str](), list[Any]()
    found: dict[str, Any] = {"kind": type(made).__name__, "results": results}

    def sent(act: Callable[[], object]) -> None:
        done = threading.Event()

        def end(value: object) -> None:
            threads.add(threading.current_thread().name)
            results.append(value)
            done.set()

        made.when_made(lambda: end(act()), lambda error: end(f"{type(error).__name__}: {error}"))
        assert done.wait(60)

    def computed() -> None:
        (there,) = made.to_device([torch.arange(6.0).view(2, 3).t()])()
        found["arrived"] = [str(there.device), list(there.stride())]
        output = there * 2
        del there
        host, shared = made.copied(output, torch.bfloat16), torch.zeros(3, 2)
        made.write(shared, output)
        output.add_(100)  # as a layer does that writes to its output in its next forward
        sent(lambda: [host.tolist(), shared.tolist()])
        made.write(torch.zeros(7), output)
        sent(lambda: "not reached")
        on_cpu = made.to_host(torch.ones(2), torch.float64)
        sent(on_cpu.tolist)

    def is_too_large() -> None:
        arriving = made.to_device([torch.empty(1).expand(2**19)])
        found["memory"] = "the caller has gone on"
        arriving()

    found["failed"] = failure(computed)
    computing = (1, torch.accelerator.current_stream(1).stream_id)
    streams = torch.get_device_module(device).streams
    found["waited"] = computing in streams.clocks[1, made._in.stream_id]
    found["full"] = failure(is_too_large)
    return {**found, "threads": sorted(threads)}


def copied_directly(other_device: str, taken_out: str = "", instead: str = "") -> dict[str, Any]:
    """Copy from device to device and back, in this process; return what was found."""
    take_out(taken_out, instead)
    one, other = torch.device("pretend:0"), torch.device(other_device)
    side = torch.Stream(device=one)  # or all that has no other stream would be in order with it
    reader: Any = copies.copies_of(other)
    with side:
        producer = copies.copies_of(one)
    own = OwnMemory("", one)
    peer = PeerMemory(own.address.fd, "pretend")

    def wait(of: Copies) -> None:
        done = threading.Event()
        of.when_made(done.set, lambda error: print(error, file=sys.stderr))
        assert done.wait(60)

    def sent(number: int) -> tuple[SharedTensor, Any]:
        with side:
            placed = own.allocate((4,), torch.float32, requires_grad=True)
            output = torch.full((4,), float(number), device=one)
            producer.write(placed.tensor, output)
            output.add_(100)
            lent = placed.lend()
            wait(producer)
        assert not isinstance(lent, Tensor)
        lent.attach(peer)
        return placed, lent

    found: dict[str, Any] = {"inputs": [], "gradients": [], "held": []}
    kept = list[Callable[[], list[Tensor]]]()

    def exchanged() -> None:
        for number in range(4):
            placed, lent = sent(number)
            arriving = reader.to_device([lent.tensor])
            found["held"].append(len(reader._reading))
            kept.append(arriving)
            gradient = torch.full((4,), float(10 * number), device=other)
            if number % 2:
                arriving()[0].cpu()
                reader.to_device([torch.ones(2)])  # finds that all copies are made
                lent.give_gradient(gradient, reader.write)
                gradient.add_(1)
                del lent
                sent(77)  # which must not get the block that is written to
                wait(reader)
                taken = placed.take_gradient()
                assert taken is not None
                back = producer.to_device([taken])
                del placed, taken
                sent(88)
                with side:
                    (arrived,) = back()
                    found["gradients"].append(arrived.cpu().tolist())
            else:
                del lent, placed
                sent(99)  # nor one that is read
        for each in kept:
            (tensor,) = each()
            found["inputs"].append(tensor.cpu().tolist())
        placed, lent = sent(5)
        lent.give_gradient(torch.full((4,), 50.0, device=other), reader.write)
        del placed, lent  # the step was aborted
        with side:
            next_ones = [own.allocate((1000,), torch.float32) for _ in range(8)]  # all free blocks
            for following in next_ones:
                producer.write(following.tensor, torch.full((1000,), 7.0, device=one))
        wait(producer)
        wait(reader)
        found["next"] = sorted({x for each in next_ones for x in each.tensor.cpu().tolist()})

    found["failed"] = failure(exchanged)
    return found


DOUBLED = [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


@on_a_device
def test_copies_there_and_back() -> None:
    found = in_a_fork(copied)
    assert found["kind"] == "OverlappedCopies"
    assert found["failed"] is None
    values, failed, on_cpu = found["results"]
    assert values == [DOUBLED, DOUBLED]
    assert found["arrived"] == ["pretend:1", [1, 3]]
    assert failed.startswith("RuntimeError: The size of tensor a (7) must match")
    assert on_cpu == [1.0, 1.0]
    assert set(found["threads"]) == {"rpcmp-send_0", "MainThread"}  # if nothing is left to copy
    assert found["waited"] is False
    assert found["memory"] == "the caller has gone on"
    assert found["full"].startswith("OutOfMemoryError: pretend out of memory")


@pytest.mark.parametrize(
    ("taken_out", "instead", "reason"),
    [
        ("self._computing.wait_event(made)", "pass", "aten.mul.Tensor reads what"),
        ("copy.record_stream(self._computing)", "pass", "memory is freed that"),
        (
            f"self._out.wait_stream(self._computing)\n{' ' * 12}with self._out:\n{' ' * 16}pinned",
            f"with self._out:\n{' ' * 16}pinned",
            "aten.copy_.default reads what",
        ),
        (
            "own.record_stream(self._out)\n        self",
            "pass\n        self",
            "memory is freed that",
        ),
        ("dtype, copy=True,", "dtype,", "aten.add_.Tensor writes what"),
        ("made.synchronize()", "pass", ""),
    ],
    ids=["arriving", "arrived memory", "leaving", "left memory", "a copy of its own", "the host"],
)
@on_a_device
def test_each_wait_is_needed(taken_out: str, instead: str, reason: str) -> None:
    found = in_a_fork(copied, taken_out, instead)
    if reason:
        assert "a race on the pretend accelerator" in found["failed"]
        assert reason in found["failed"]
    else:
        assert found["results"][0] != [DOUBLED, DOUBLED]


DIRECTLY: dict[str, Any] = {
    "inputs": [[float(number)] * 4 for number in range(4)],
    "gradients": [[10.0] * 4, [30.0] * 4],
    "held": [1, 2, 1, 2],
    "next": [7.0],
    "failed": None,
}


@pytest.mark.parametrize("other", ["pretend:0", "pretend:1"])
@on_a_device
def test_tensors_go_from_device_to_device(other: str) -> None:
    assert in_a_fork(copied_directly, other) == DIRECTLY


@pytest.mark.parametrize(
    ("taken_out", "instead"),
    [
        ("self._reading.append(", "bool("),
        (".query()", " is not None"),
        ("self._on_devices.append(target)", "pass"),
        ("made.synchronize()", "pass"),
        (f"{' ' * 20}target.copy_(own, non_blocking=True)", f"{' ' * 20}pass"),
        ("own.record_stream(self._out)\n\n", "\n"),
        (
            f"{' ' * 12}self._out.wait_stream(self._computing)\n{' ' * 12}if not",
            f"{' ' * 12}if not",
        ),
    ],
    ids=["held", "until read", "held until written", "the host", "written", "memory", "leaving"],
)
@on_a_device
def test_each_part_of_that_is_needed(taken_out: str, instead: str) -> None:
    assert in_a_fork(copied_directly, "pretend:1", taken_out, instead) != DIRECTLY


def test_a_cpu_and_a_device_without_streams_copy_plainly() -> None:
    for device in (CPU, torch.device("meta")):
        assert type(copies_of(device)) is Copies
    x, made = torch.ones(2, requires_grad=True), Copies(CPU)
    (there,) = made.to_device([x])()
    assert there.data_ptr() == x.data_ptr()
    assert not there.requires_grad
    assert made.to_host(x.detach(), torch.float32).data_ptr() == x.data_ptr()
    assert made.copied(x, torch.float32).data_ptr() != x.data_ptr()
    acts: list[str] = []
    made.when_made(lambda: acts.append("now"), lambda error: acts.append(str(error)))
    assert acts == ["now"]


def test_what_must_not_raise_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    seen: list[object] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: seen.append(kind))

    def act() -> None:
        raise KeyError

    copies._or_exit(act)
    assert (ended, seen) == ([1], [KeyError])
