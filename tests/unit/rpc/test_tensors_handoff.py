"""Trees of tensors between two ends of a connection, here in one process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from rpcmp.pipelining import pytree
from rpcmp.rpc.tensors import Handoff, same_bits
from tests.support.processes import no_more_files


class Ends(NamedTuple):
    here: Handoff
    there: Handoff


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends(*map(Handoff, socket.socketpair()))
    yield both
    for end in both:
        end.close()


def sent(ends: Ends, message: Any) -> Any:
    """Return `message` as the other end receives it."""
    sender = threading.Thread(target=ends.here.send, args=[message])
    sender.start()
    received = ends.there.receive()
    sender.join()
    return received


TREE = {
    "b": [torch.ones(2), 3, -(2**70), 0.1, float("inf"), True],
    "a": (torch.zeros(1), {"x": None}, [], (), {}, "Zürich \N{SNOWMAN}\x00"),
    "tensor": "0",
    "keys": {1: "one", "1": "text", None: 2, 1.5: 3},  # which are no strings only
}


@pytest.mark.parametrize("message", [None, "text", [], TREE], ids=["none", "text", "list", "tree"])
def test_a_tree_arrives_unchanged_and_in_order(ends: Ends, message: Any) -> None:
    assert repr(sent(ends, message)) == repr(message)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.tensor(1.5),
        torch.tensor(7),
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.int32),
        torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(10)[3:7:2],
        torch.ones(1, 3).expand(4, 3),
        torch.ones(2, requires_grad=True),
    ],
    ids=pytree.describe,
)
def test_a_tensor_arrives_with_its_bits(ends: Ends, tensor: torch.Tensor) -> None:
    received = sent(ends, tensor)
    assert same_bits(received, tensor)
    assert received.is_contiguous()
    assert not received.requires_grad


def test_tied_tensors_arrive_as_two_tensors(ends: Ends) -> None:
    weight = torch.arange(4.0)
    first, second, view = sent(ends, [weight, weight, weight[1:]])
    first += 1
    assert second.tolist() == [0, 1, 2, 3]
    assert view.tolist() == [1, 2, 3]


def test_received_tensors_share_no_memory_with_sent_ones(ends: Ends) -> None:
    tensor = torch.zeros(3)
    received = sent(ends, tensor)
    tensor += 1
    assert received.tolist() == [0, 0, 0]
    received += 2
    assert received.tolist() == [2, 2, 2]


def test_more_than_a_sockets_buffer_arrives(ends: Ends) -> None:
    message = ["x" * 3_000_000, torch.arange(1_000_000)]
    text, tensor = sent(ends, message)
    assert text == message[0]
    assert torch.equal(tensor, torch.arange(1_000_000))


def test_messages_arrive_in_order_and_leave_no_descriptors_open(ends: Ends) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for index in range(20):
        assert sent(ends, torch.tensor(index)).item() == index
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("leaf", [object(), b"bytes", {1, 2}, 1j])
def test_an_unsupported_leaf_is_refused_and_the_connection_stays_open(
    ends: Ends, leaf: object
) -> None:
    with pytest.raises(TypeError, match=f"{type(leaf).__name__} is neither a tensor"):
        ends.here.send([torch.ones(1), leaf])
    assert sent(ends, "next") == "next"


def test_a_closed_connection_raises_eof_error(ends: Ends) -> None:
    ends.here.close()
    with pytest.raises(EOFError):
        ends.there.receive()


def test_a_connection_closed_inside_a_message_raises_eof_error() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(b"\0\0\0\0\0\0\0\x09{")
    receiver = Handoff(theirs)
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_sending_to_a_closed_connection_raises_os_error(ends: Ends) -> None:
    ends.there.close()
    with pytest.raises(OSError, match="Broken pipe"):
        ends.here.send(torch.ones(1))


def test_a_process_that_may_open_no_more_files_is_told(ends: Ends) -> None:
    ends.there.send(torch.ones(2))
    with no_more_files(), pytest.raises(OSError, match="Too many open files"):
        ends.here.receive()
