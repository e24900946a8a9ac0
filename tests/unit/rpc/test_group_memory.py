"""What members of a group have in common: nothing, or memory of their host or of their devices."""

from __future__ import annotations

import pytest
import torch

from rpcmp.errors import SecurityError
from rpcmp.rpc.group_memory import GroupMemory
from rpcmp.rpc.shared_memory import SharedTensor, Sharing


def nobody(member: str) -> bytes:
    raise AssertionError(f"{member} is not asked")


def lent(memory: GroupMemory, sharing: Sharing) -> SharedTensor:
    place = memory.for_reader(sharing)
    assert place is not None
    tensor = place.place(torch.arange(3.0)).lend()
    assert isinstance(tensor, SharedTensor)
    return tensor


def test_a_member_of_the_same_host_is_found_once() -> None:
    asked: list[str] = []

    def announced(member: str) -> bytes:
        asked.append(member)
        return other.announced.encode()

    own, other = GroupMemory("a", announced), GroupMemory("b", nobody)
    assert [own.sharing("b") for _ in range(2)] == [Sharing.HOST] * 2
    assert own.shares_host("b")
    assert asked == ["b"]
    tensor = lent(other, Sharing.HOST)
    own.attach(tensor, "b")
    assert tensor.tensor.tolist() == [0, 1, 2]


def test_a_member_of_another_host_sends_by_rpc() -> None:
    other = GroupMemory("b", nobody)
    own = GroupMemory("a", lambda _: other.announced.encode(), lambda _: None)
    assert own.sharing("b") is Sharing.NONE
    assert own.for_reader(Sharing.NONE) is None
    with pytest.raises(SecurityError, match="'b' answers with memory that it does not share"):
        own.attach(lent(other, Sharing.HOST), "b")


def test_without_memory_on_a_device_its_readers_get_the_hosts() -> None:
    own = GroupMemory("a", nobody, device=torch.device("cpu"))
    assert own.for_reader(Sharing.DEVICE) is own.own


def test_only_who_computes_on_a_device_tries_the_others() -> None:
    other = GroupMemory("b", nobody)
    meta = torch.device("meta")  # which none can open
    on_device = GroupMemory("a", lambda _: other.announced.encode(), device=meta)
    assert on_device.announced.endswith("\n")
    assert on_device.sharing("b") is Sharing.HOST
    forged = lent(other, Sharing.HOST)
    forged.on_device = True
    with pytest.raises(SecurityError, match="memory that it does not share"):
        on_device.attach(forged, "b")


def test_a_member_may_not_announce_the_memory_of_another() -> None:
    """One on another host learns where a member's memory is, and could lend it as its own."""
    victim = GroupMemory("victim", nobody)
    own = GroupMemory("a", lambda _: victim.announced.encode())
    with pytest.raises(SecurityError, match="'b' announces memory that is not its own"):
        own.sharing("b")
    assert GroupMemory("c", lambda _: victim.announced.encode()).sharing("victim") is Sharing.HOST
