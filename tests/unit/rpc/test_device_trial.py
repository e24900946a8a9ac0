"""Whether tensors can stay on devices: found out by a trial, with the host as the way around."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rpcmp.process.memory_access import MemoryAddress
from rpcmp.rpc import device_trial
from rpcmp.rpc.device_memory import KINDS
from rpcmp.rpc.device_trial import create, open_tried
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor
from tests.support.hostkind import host_kind

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _kind() -> Iterator[None]:
    with host_kind():
        yield


def found(address: str) -> int:
    return os.dup(MemoryAddress.parse(address).fd)


def test_a_pair_that_passes_shares_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own, trial = create("a", CPU)
    assert own is not None
    peer = open_tried("a", trial, found, CPU)
    assert peer is not None
    assert "tensors of 'a' come to cpu from its device" in caplog.text
    placed = own.place(torch.arange(3.0), requires_grad=True)
    lent = placed.lend()
    assert not isinstance(lent, torch.Tensor)
    lent.attach(peer)
    assert lent.tensor.tolist() == [0, 1, 2]
    lent.give_gradient(torch.ones(3))
    gradient = placed.take_gradient()
    assert gradient is not None
    assert gradient.tolist() == [1, 1, 1]


def test_a_device_that_cannot_be_shared_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert create("a", torch.device("meta")) == (None, "")
    assert "no way yet to open memory of a meta device in another process" in caplog.text
    assert open_tried("a", "", found, CPU) is None


def test_a_device_that_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setitem(KINDS, "cpu", KINDS["cpu"]._replace(create=refuse))
    assert create("a", CPU) == (None, "")
    assert "cpu cannot lend its memory" in caplog.text
    assert "operation not supported" in caplog.text


def test_a_handle_that_is_too_long_is_a_refusal(caplog: pytest.LogCaptureFixture) -> None:
    with host_kind(handle=b"x" * 5000):
        assert create("a", CPU) == (None, "")
    assert "a handle of 5000 bytes" in caplog.text


def test_another_host_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    _, trial = create("a", CPU)
    assert open_tried("a", trial, lambda _: None, CPU) is None
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (4, "00" * device_trial.PATTERN, "other bytes arrive than are there"),
        (1, "cuda:0", "there is no memory of 'cuda:0' devices here"),
        (2, 64, "memory that is no block"),
        (3, 1, "a tensor of"),
        (2, "0", "by what is no number"),
    ],
)
def test_a_trial_that_fails_is_told(
    place: int, value: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = json.loads(create("a", CPU)[1])
    fields[place] = value
    assert open_tried("a", json.dumps(fields), found, CPU) is None
    assert "tensors of 'a' cannot come to cpu from its device" in caplog.text
    assert message in caplog.text


def test_a_device_that_others_can_only_read_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give, close, closed = SharedTensor.give_gradient, os.close, list[int]()

    def lose(placed: SharedTensor, gradient: torch.Tensor) -> None:
        give(placed, gradient * 0)

    def closing(fd: int) -> None:
        closed.append(fd)
        close(fd)

    _, trial = create("a", CPU)
    descriptor = found(json.loads(trial)[0])
    monkeypatch.setattr(SharedTensor, "give_gradient", lose)
    monkeypatch.setattr(os, "close", closing)
    assert open_tried("a", trial, lambda _: descriptor, CPU) is None
    assert "other bytes are written there than were sent" in caplog.text
    assert descriptor in closed


@pytest.mark.parametrize("trial", ["{", "7", "[1]", json.dumps(["", "cpu", 0, 4096, 5])])
def test_what_is_no_trial_fails(trial: str, caplog: pytest.LogCaptureFixture) -> None:
    assert open_tried("a", trial, lambda _: os.dup(OwnMemory().address.fd), CPU) is None
    assert "cannot come to cpu" in caplog.text
