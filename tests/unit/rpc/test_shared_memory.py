"""Memory that processes of one host share: places, lifetimes, and what nobody may be led to."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rpcmp.errors import SecurityError
from rpcmp.rpc import shared_memory, unpickler
from rpcmp.rpc.device_memory import KINDS
from rpcmp.rpc.memory_blocks import DEVICE_SEGMENT, MAX_READERS, MIN_BLOCK, SEGMENT, PeerMemory
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor
from rpcmp.rpc.tensors import same_bits
from tests.support.hostkind import host_kind

X = torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def own() -> OwnMemory:
    return OwnMemory()


@pytest.fixture
def peer(own: OwnMemory) -> PeerMemory:
    return PeerMemory(own.address.fd)


def sent(tensor: SharedTensor, peer: PeerMemory, elements: slice | None = None) -> SharedTensor:
    """Lend a tensor, and return what its reader gets by a message."""
    lent = tensor.lend(elements)
    arrived = pickle.loads(pickle.dumps(lent))
    assert isinstance(arrived, SharedTensor)
    arrived.attach(peer)
    return arrived


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.t(),
        X[:, 1:3],
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.tensor([-0.0, float("nan")], dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.arange(5, dtype=torch.uint8),
        torch.randn(1000, 1000),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_reader_has_the_bits_of_a_tensor(
    tensor: Tensor, own: OwnMemory, peer: PeerMemory
) -> None:
    found = sent(own.place(tensor), peer).tensor
    assert same_bits(found, tensor)
    assert found.is_contiguous()


def test_another_dtype_may_travel(own: OwnMemory, peer: PeerMemory) -> None:
    found = sent(own.place(X, torch.bfloat16), peer).tensor
    assert same_bits(found, X.to(torch.bfloat16))


def test_a_gradient_returns_beside_the_data(own: OwnMemory, peer: PeerMemory) -> None:
    placed = own.place(X, requires_grad=True)
    arrived = sent(placed, peer)
    arrived.give_gradient((X * 2).t().contiguous().t())
    gradient = placed.take_gradient()
    assert gradient is not None
    assert same_bits(gradient, X * 2)
    assert same_bits(arrived.tensor, X)


def test_no_gradient_is_not_zeros(own: OwnMemory, peer: PeerMemory) -> None:
    placed = own.place(X, requires_grad=True)
    sent(placed, peer).give_gradient(None)
    assert placed.take_gradient() is None


def test_what_needs_no_gradient_has_none_in_a_block_that_had_one(
    own: OwnMemory, peer: PeerMemory
) -> None:
    placed = own.place(X, requires_grad=True)
    sent(placed, peer).give_gradient(X)
    del placed
    for requires_grad in (False, True):
        assert own.place(X, requires_grad=requires_grad).take_gradient() is None
    assert own.size == MIN_BLOCK


def test_readers_that_ask_at_once_have_marks_of_their_own(own: OwnMemory) -> None:
    placed = own.place(X)
    with ThreadPoolExecutor(8) as pool:
        lent = list(pool.map(lambda _: placed.lend(), range(MAX_READERS)))
    marks = {one.reader for one in lent if isinstance(one, SharedTensor)}
    assert len(marks) == MAX_READERS


def test_a_block_is_used_again_once_both_ends_have_lost_it(
    own: OwnMemory, peer: PeerMemory
) -> None:
    gc.disable()  # nothing of it is left for the garbage collector
    try:
        for _ in range(10):
            placed = own.place(X, requires_grad=True)
            arrived = sent(placed, peer)
            arrived.give_gradient(X)
            del placed, arrived
    finally:
        gc.enable()
    assert own.size == MIN_BLOCK


@pytest.mark.parametrize("end", ["reader", "producer"])
def test_a_view_that_is_kept_keeps_its_bits(end: str, own: OwnMemory, peer: PeerMemory) -> None:
    """A layer may keep its input, and `.grad` may be the very gradient that has arrived."""
    placed = own.place(X, requires_grad=True)
    arrived = sent(placed, peer)
    arrived.give_gradient(X)
    kept = placed.take_gradient() if end == "producer" else arrived.tensor
    del placed, arrived
    for _ in range(5):
        sent(own.place(torch.zeros(3, 4), requires_grad=True), peer).give_gradient(
            torch.zeros(3, 4)
        )
    assert kept is not None
    assert same_bits(kept, X)
    assert own.size == 2 * MIN_BLOCK


def test_a_block_that_was_lent_waits_for_its_reader(own: OwnMemory, peer: PeerMemory) -> None:
    """The answer may still be on its way when the producer has forgotten it."""
    message = pickle.dumps(own.place(X).lend())
    own.place(torch.zeros(3, 4))
    arrived: SharedTensor = pickle.loads(message)
    arrived.attach(peer)
    assert same_bits(arrived.tensor, X)


def test_a_block_that_was_not_lent_is_free(own: OwnMemory) -> None:
    for _ in range(3):  # such as those of a bundle whose last micro-batch has failed
        own.place(X)
    assert own.size == MIN_BLOCK


def test_several_readers_get_parts_of_one_block(own: OwnMemory, peer: PeerMemory) -> None:
    placed = own.place(torch.arange(10.0))
    parts = [sent(placed, peer, slice(first, first + 5)).tensor for first in (0, 5)]
    del placed
    assert [part.tolist() for part in parts] == [list(range(5)), list(range(5, 10))]
    del parts[0]
    own.place(torch.zeros(10))
    assert parts[0].tolist() == list(range(5, 10))
    del parts
    own.place(torch.zeros(10))
    assert own.size == 2 * MIN_BLOCK


@pytest.mark.parametrize("elements", [2**17 - 16, 2**17 - 17, 2**17 - 21])
def test_a_part_may_end_where_its_block_does(
    elements: int, own: OwnMemory, peer: PeerMemory
) -> None:
    placed = own.place(torch.arange(float(elements)))
    bounds = [elements * part // 3 for part in range(4)]
    for first, last in itertools.pairwise(bounds):
        part = sent(placed, peer, slice(first, last)).tensor
        assert (int(part[0]), int(part[-1])) == (first, last - 1)


def test_blocks_take_few_descriptors(own: OwnMemory, peer: PeerMemory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    kept = [sent(own.place(X), peer) for _ in range(100)]
    large = sent(own.allocate((SEGMENT // 4,), torch.float32), peer)  # a segment of its own
    large.tensor[-1] = 1
    assert large.capacity > SEGMENT
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    assert all(same_bits(each.tensor, X) for each in kept)


def test_a_fork_of_a_reader_gives_nothing_back(own: OwnMemory, peer: PeerMemory) -> None:
    placed = own.place(X)
    arrived = sent(placed, peer)
    region = peer.region(arrived.offset, arrived.capacity)
    shared_memory._give_back(region, arrived.reader, os.getpid() + 1)
    assert region.is_read
    del arrived
    assert not region.is_read


def test_too_many_readers_get_copies(own: OwnMemory) -> None:
    placed = own.place(X)
    lent = [placed.lend() for _ in range(MAX_READERS + 2)]
    assert all(isinstance(one, SharedTensor) for one in lent[:MAX_READERS])
    assert [same_bits(one, X) for one in lent[MAX_READERS:] if isinstance(one, Tensor)] == [
        True
    ] * 2


def test_sizes_that_change_share_blocks(own: OwnMemory, peer: PeerMemory) -> None:
    for length in range(1500, 2000):  # of sequences, for example
        sent(own.place(torch.ones(length)), peer)
    assert own.size == 8192


def test_the_unpickler_knows_what_a_message_names(own: OwnMemory, peer: PeerMemory) -> None:
    import io

    data = pickle.dumps(own.place(X).lend())
    arrived = unpickler.Unpickler(io.BytesIO(data)).load()
    arrived.attach(peer)
    assert same_bits(arrived.tensor, X)


@pytest.mark.parametrize(
    "forged",
    [
        SharedTensor(0, 1 << 40, torch.float32, (2,), reader=1),
        SharedTensor(1 << 40, 4096, torch.float32, (2,), reader=1),
        SharedTensor(SEGMENT - 4096, 8192, torch.float32, (2,), reader=1),
        SharedTensor(-4096, 4096, torch.float32, (2,), reader=1),
        SharedTensor(64, 4096, torch.float32, (2,), reader=1),
        SharedTensor(0, 4096, torch.float32, (5000,), reader=1),
        SharedTensor(0, 4096, torch.float32, (-2, -2), reader=1),
        SharedTensor(0, 4096, torch.float32, (2,), start=-128, reader=1),
        SharedTensor(0, 4096, torch.float32, (2,), start=4096, reader=1),
        SharedTensor(0, 4096, torch.float32, (2,), reader=0),
        SharedTensor(0, 4096, torch.float32, (2,), reader=64),
        SharedTensor(0, 0, torch.float32, (0,), reader=1),
        SharedTensor(0, 4096, torch.float32, cast(Any, (1.5,)), reader=1),
        SharedTensor(0, 4096, torch.float32, (True,), reader=1),
        SharedTensor(cast(Any, "0"), 4096, torch.float32, (2,), reader=1),
        SharedTensor(0, 4096, cast(Any, None), (2,), reader=1),
        SharedTensor(0, 4096, torch.int64, (2,), requires_grad=True, reader=1),
        SharedTensor(0, 4096, torch.float32, (2,), requires_grad=cast(Any, 1), reader=1),
    ],
    ids=repr,
)
def test_a_message_cannot_name_what_is_no_block(
    forged: SharedTensor, own: OwnMemory, peer: PeerMemory
) -> None:
    own.place(X)
    with pytest.raises(SecurityError):
        forged.attach(peer)


@pytest.fixture
def on_device() -> Iterator[tuple[OwnMemory, PeerMemory]]:
    with host_kind() as opened:
        own = OwnMemory("", torch.device("cpu"))
        yield own, PeerMemory(own.address.fd, "cpu")
        assert len(opened) <= 2  # once a segment


@pytest.mark.parametrize("tensor", [X, X.t(), torch.empty(0, 3), torch.tensor([1 + 2j])], ids=str)
def test_on_a_device_it_is_the_same(
    tensor: Tensor, on_device: tuple[OwnMemory, PeerMemory]
) -> None:
    own, peer = on_device
    placed = own.place(tensor, requires_grad=True)
    arrived = sent(placed, peer)
    assert same_bits(arrived.tensor, tensor)
    arrived.give_gradient(tensor * 2)
    gradient = placed.take_gradient()
    assert gradient is not None
    assert same_bits(gradient, tensor * 2)


def test_on_a_device_a_block_is_kept_by_its_tensors_and_their_very_views(
    on_device: tuple[OwnMemory, PeerMemory],
) -> None:
    own, peer = on_device
    for _ in range(5):
        sent(own.place(X), peer)
    assert own.size == 2 * MIN_BLOCK
    view = sent(own.place(X), peer).tensor
    sent(own.place(X * 2), peer)
    assert same_bits(view, X)
    assert own.size == 4 * MIN_BLOCK
    large = sent(own.allocate((SEGMENT // 4,), torch.float32), peer)  # a segment of its own
    large.tensor[-1] = 1
    del large, view
    sent(own.place(X), peer)
    assert own.size == 4 * MIN_BLOCK + SEGMENT + DEVICE_SEGMENT


def test_memory_of_a_device_and_of_the_host_are_told_apart(
    own: OwnMemory, peer: PeerMemory, on_device: tuple[OwnMemory, PeerMemory]
) -> None:
    for lent, wrong in ((own.place(X).lend(), on_device[1]), (on_device[0].place(X).lend(), peer)):
        assert isinstance(lent, SharedTensor)
        on_device[0].place(X)
        with pytest.raises(SecurityError, match="memory"):
            lent.attach(wrong)


def test_too_many_readers_of_a_device_get_copies_on_the_host(
    on_device: tuple[OwnMemory, PeerMemory],
) -> None:
    placed = on_device[0].place(X)
    *_, last = [placed.lend() for _ in range(MAX_READERS + 1)]
    assert isinstance(last, Tensor)
    assert same_bits(last, X)


def test_a_device_without_memory_left_has_the_hosts_and_says_so(
    on_device: tuple[OwnMemory, PeerMemory],
    own: OwnMemory,
    peer: PeerMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    own_there, peer_there = on_device
    sent(own_there.place(X), peer_there)
    with monkeypatch.context() as full:
        full.setitem(KINDS, "cpu", KINDS["cpu"]._replace(create=refuse))
        with pytest.raises(torch.OutOfMemoryError):
            own_there.allocate((SEGMENT // 4,), torch.float32)
    smaller = sent(own_there.allocate((DEVICE_SEGMENT // 4,), torch.float32), peer_there)
    assert smaller.on_device
    monkeypatch.setitem(KINDS, "cpu", KINDS["cpu"]._replace(create=refuse))
    own_there.on_host = own
    for _ in range(2):
        large = sent(own_there.allocate((SEGMENT // 4,), torch.float32, True), peer)
        assert not large.on_device
        assert large.requires_grad
    assert sent(own_there.place(X), peer_there).on_device  # there is room in what it has
    (warning,) = caplog.messages
    assert "cpu has no memory left for tensors on their way to others" in warning
