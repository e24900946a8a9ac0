"""What a member's store asks its supervisor; test_torch_contract has what an agent does with it."""

from __future__ import annotations

import base64

import pytest

from rpcmp.errors import JobError, to_wire
from rpcmp.process.channel import Message
from rpcmp.rpc import channel_store
from rpcmp.rpc.channel_store import ChannelStore
from rpcmp.server.connection import MAX_PEERS_MESSAGE
from rpcmp.server.rendezvous import MAX_KEYS_PER_GET
from rpcmp.v1 import control_pb2 as pb


class Supervisor:
    """Answers a store: the value of a key is its own name, and how often it was asked for."""

    def __init__(self) -> None:
        self.store = ChannelStore(self._answer)
        self.asked: list[Message] = []
        self.error = ""

    def _answer(self, asked: Message) -> None:
        self.asked.append(asked)
        count = sum(one["call"] == asked["call"] for one in self.asked)
        texts = [f"{key} {count}" for key in asked["keys"]]
        if asked["call"] == "add":
            texts = ["7"]
        values = [base64.b64encode(text.encode()).decode() for text in texts]
        outcome = {"error": self.error} if self.error else {"values": values}
        self.store.set_answer({"id": asked["id"], **outcome})


@pytest.mark.parametrize("members", [2, 8, 64])
def test_a_member_asks_once_for_what_every_member_sets(members: int) -> None:
    """So the questions of a group grow with its members, not with their square."""
    supervisor = Supervisor()
    names, addresses = ([f"{kind}/{n}" for n in range(members)] for kind in ("names", "addrs"))
    supervisor.store.get_together(names)
    supervisor.store.get_together(iter(addresses))
    assert [supervisor.store.get(key) for key in names] == [f"{key} 1".encode() for key in names]
    assert supervisor.store.get(addresses[-1]) == f"{addresses[-1]} 2".encode()
    assert supervisor.store.get(addresses[0]) == f"{addresses[0]} 2".encode()
    assert [asked["keys"] for asked in supervisor.asked] == [names, addresses]


def test_other_keys_are_asked_for_each_time() -> None:
    supervisor = Supervisor()
    supervisor.store.get_together(["names/0"])
    assert [supervisor.store.get("left") for _ in range(2)] == [b"left 1", b"left 2"]
    assert supervisor.store.add("names/0", 3) == 7
    assert supervisor.store.compare_set("names/0", "a", b"b") == b"names/0 1"
    supervisor.store.set("names/0", "c")
    kept = {"event", "id", "call"}
    assert [{key: one[key] for key in one.keys() - kept} for one in supervisor.asked[2:]] == [
        {"keys": ["names/0"], "amount": 3},
        {"keys": ["names/0"], "expected": "YQ==", "value": "Yg=="},
        {"keys": ["names/0"], "value": "Yw=="},
    ]


def test_an_error_is_raised_and_not_kept() -> None:
    supervisor = Supervisor()
    supervisor.store.get_together(["names/0", "names/1"])
    supervisor.error = to_wire(JobError("no"))
    with pytest.raises(JobError, match=r"^no$"):
        supervisor.store.get("names/1")
    supervisor.error = ""
    assert supervisor.store.get("names/0") == b"names/0 2"


@pytest.mark.parametrize("length", [1, 20, 200, 4000])
def test_a_question_is_no_larger_than_a_server_takes(length: int) -> None:
    supervisor = Supervisor()
    keys = [f"addrs/{number:0{length}}" for number in range(10 if length == 1 else 3000)]
    keys += [f"names/{number}" for number in range(3000)]
    supervisor.store.get_together(keys)
    assert [supervisor.store.get(key).split()[0].decode() for key in keys] == keys
    asked = [one["keys"] for one in supervisor.asked]
    assert [key for part in asked for key in part] == keys
    assert all(len(part) <= MAX_KEYS_PER_GET for part in asked)
    identity = {"job_id": "j" * 100, "generation": 2**60}
    sizes = [pb.GetRequest(**identity, keys=part).ByteSize() for part in asked]  # type: ignore[arg-type]
    assert max(sizes) < MAX_PEERS_MESSAGE
    most = channel_store.MAX_ASKED // (len(keys[0]) + channel_store.KEY_EXTRA)
    assert len(asked) <= len(keys) / most + 2
