"""What members of a group have in common: nothing, or memory of their host or of their devices."""

from __future__ import annotations

import pytest
import torch

from rpcmp.errors import SecurityError
from rpcmp.rpc.group_memory import GroupMemory
from rpcmp.rpc.shared_memory import SharedTensor, Sharing


def lent(memory: GroupMemory, sharing: Sharing) -> SharedTensor:
    place = memory.for_reader(sharing)
    assert place is not None
    tensor = place.place(torch.arange(3.0)).lend()
    assert isinstance(tensor, SharedTensor)
    return tensor


def test_a_member_of_the_same_host_is_found_once() -> None:
    own, other = GroupMemory("a"), GroupMemory("b")
    asked: list[str] = []

    def announced() -> bytes:
        asked.append("b")
        return other.announced.encode()

    assert [own.sharing("b", announced) for _ in range(2)] == [Sharing.HOST] * 2
    assert asked == ["b"]
    tensor = lent(other, Sharing.HOST)
    own.attach(tensor, "b")
    assert tensor.tensor.tolist() == [0, 1, 2]


def test_a_member_of_another_host_sends_by_rpc() -> None:
    own, other = GroupMemory("a", find=lambda _: None), GroupMemory("b")
    assert own.sharing("b", other.announced.encode) is Sharing.NONE
    assert own.for_reader(Sharing.NONE) is None
    with pytest.raises(SecurityError, match="'b' answers with memory that it does not share"):
        own.attach(lent(other, Sharing.HOST), "b")


def test_without_memory_on_a_device_its_readers_get_the_hosts() -> None:
    own = GroupMemory("a", device=torch.device("cpu"))
    assert own.for_reader(Sharing.DEVICE) is own.own


def test_only_who_computes_on_a_device_tries_the_others() -> None:
    on_device = GroupMemory("a", device=torch.device("meta"))  # which none can open
    assert on_device.announced.endswith("\n")
    assert on_device.sharing("b", GroupMemory("b").announced.encode) is Sharing.HOST
    forged = lent(GroupMemory("b"), Sharing.HOST)
    forged.on_device = True
    with pytest.raises(SecurityError, match="memory that it does not share"):
        on_device.attach(forged, "b")
