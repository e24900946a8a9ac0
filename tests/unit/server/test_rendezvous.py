"""The limits of the rendezvous' key-value store, and a worker's end of it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import pytest

from rpcmp.errors import BusyError, JobError, RpcmpError
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.process.channel import Message
from rpcmp.server.client import StageClient
from rpcmp.server.rendezvous import (
    MAX_ANSWER,
    MAX_BYTES,
    MAX_KEY,
    MAX_KEYS,
    MAX_KEYS_PER_GET,
    MAX_VALUE,
    KeyValueStore,
    StoreProxy,
    require_key_count,
)
from tests.support.eventloops import in_event_loop


def test_a_rendezvous_limits_sizes_and_counts() -> None:
    values = KeyValueStore()
    values.set("k" * MAX_KEY, bytes(MAX_VALUE))
    for key, value in [("k" * (MAX_KEY + 1), b""), ("k", bytes(MAX_VALUE + 1))]:
        with pytest.raises(JobError, match="takes no"):
            values.set(key, value)
    for number in range(MAX_KEYS - 1):
        values.set(str(number), b"")
    with pytest.raises(JobError, match="is full"):
        values.set("one more", b"")
    values.set("0", b"changed")
    assert values.get("0") == b"changed"


def test_values_are_limited_in_total() -> None:
    values = KeyValueStore()
    count = MAX_BYTES // MAX_VALUE - 1  # keys take room as well
    for number in range(count):
        values.set(str(number), bytes(MAX_VALUE))
    with pytest.raises(JobError, match="is full"):
        values.set("one more", bytes(MAX_VALUE))
    values.set("0", b"")
    values.set("one more", bytes(MAX_VALUE))


def test_values_are_given_in_the_order_of_the_keys_and_an_answer_is_limited() -> None:
    values = KeyValueStore()
    for key in ("a", "b"):
        values.set(key, key.encode())
    assert values.get_all(["b", "a", "b"]) == [b"b", b"a", b"b"]
    values.set("c", bytes(MAX_VALUE))
    most = MAX_ANSWER // MAX_VALUE
    assert len(values.get_all(["c"] * most)) == most
    with pytest.raises(JobError, match=f"gives {MAX_ANSWER} bytes of values at once, not"):
        values.get_all(["c"] * most + ["a"])


@pytest.mark.parametrize("held", [b"abc", b"", b"1.5", b"9" * 100, b"--1"])
def test_add_refuses_a_value_that_is_not_a_number(held: bytes) -> None:
    values = KeyValueStore()
    values.set("k", held)
    with pytest.raises(RpcmpError):
        values.add("k", 1)
    assert values.get("k") == held


def test_a_counter_stays_within_64_bits() -> None:
    values = KeyValueStore()
    assert values.add("k", 2**63 - 1) == 2**63 - 1
    with pytest.raises(JobError, match="64 bits"):
        values.add("k", 1)
    assert values.add("k", -(2**63)) == -1
    assert values.add("k", -1) == -2


@in_event_loop
async def test_a_waiting_task_is_woken_by_its_own_keys_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rpcmp.server.rendezvous.MAX_WAITING", 3)

    values = KeyValueStore()
    both = asyncio.create_task(values.wait_for(["a", "b"]))
    given_up = asyncio.create_task(values.wait_for(["c"]))
    other = asyncio.create_task(values.wait_for(["c"]))
    await asyncio.sleep(0)
    with pytest.raises(JobError, match="3 questions to the rendezvous are unanswered"):
        await values.wait_for(["d"])
    given_up.cancel()
    values.set("b", b"")
    await asyncio.sleep(0)
    values.set("a", b"")
    await both
    assert not other.done()
    values.close()
    for wait in (other, asyncio.create_task(values.wait_for(["c"]))):
        with pytest.raises(BusyError, match="the job ended"):
            await wait
    assert not values._arrivals
    await values.wait_for(["a", "b"])


@pytest.mark.parametrize("count", [0, MAX_KEYS_PER_GET + 1])
def test_a_request_is_refused_if_it_names_no_key_or_too_many(count: int) -> None:
    with pytest.raises(JobError, match=f"for {count} keys"):
        require_key_count(["k"] * count)
    require_key_count(["k"] * MAX_KEYS_PER_GET)


@in_event_loop
async def test_a_worker_finds_a_relay_in_place_of_a_member_in_another_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def store_get(client: StageClient, job: Message, keys: Sequence[str]) -> list[bytes]:
        return [stored.get(key, f"value of {key}".encode()) for key in keys]

    stored = {"addrs/a:0": b"uv://127.0.0.1:5"}
    monkeypatch.setattr(StageClient, "store_get", store_get)
    answers: asyncio.Queue[Message] = asyncio.Queue()
    where = ("127.0.0.1:1", 0, Dialer(Security()))
    proxy = StoreProxy(*where, "job", 1, answers.put_nowait, {"b:0": "127.0.0.1:7"})
    keys = ["addrs/a:0", "addrs/b:0", "names/b:0"]
    proxy.handle({"id": 1, "call": "get", "keys": keys})
    answer = await answers.get()
    for address in (b"uv://10.0.0.2:5", b"shm://127.0.0.1:5", b"uv://127.0.0.1:5,uv://10.0.0.2:5"):
        stored["addrs/a:0"] = address
        proxy.handle({"id": 1, "call": "get", "keys": keys[:1]})
        refused = await answers.get()
        assert "values" not in refused
        assert "says that it runs in this host's network" in str(refused["error"])
    await proxy.close()
    values = [base64.b64decode(value) for value in answer["values"]]
    assert values == [b"uv://127.0.0.1:5", b"uv://127.0.0.1:7", b"value of names/b:0"]
