"""The rendezvous of a group: its key-value store, the service for it, and its end at each worker.

    agent ──ChannelStore──> StoreProxy ──gRPC──> RendezvousServicer ──> KeyValueStore

The server of the first stage has the store. A worker has no connection to other hosts, so its own
server makes the calls for it.

Any stage of the group may write to the store. The bounds keep a stage that fails, or that an
attacker controls, from taking up all memory.
"""

from __future__ import annotations

import asyncio
import base64
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from rpcmp.errors import BusyError, JobError, RpcmpError, SecurityError, one_line, to_wire
from rpcmp.net.peer_connection import Dialer
from rpcmp.process.channel import Message
from rpcmp.server.client import StageClient

MAX_KEY = 4096
"""Characters of a key. Keys contain workers' names, and these contain stages' names."""

MAX_VALUE = 32 * 1024
"""Bytes of a value; an agent's address has some hundred."""

MAX_KEYS = 16 * 1024
"""For groups of a thousand: an agent has a few."""

MAX_BYTES = 16 * 2**20
"""Of all keys and values together."""

MAX_KEYS_PER_GET = 1024
"""Keys per Get request."""

MAX_ANSWER = 2**20
"""Bytes of the values that a Get request asks for."""

MAX_WAITING = 16 * 1024
"""Get requests that wait for keys."""

_LONGEST = len(str(-(2**63)))


class KeyValueStore:
    """A bounded key-value store, for one event loop.

    A task that waits for a key is woken by that key only: in a group of a thousand each member
    waits for each other.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        # Tasks that wait hold the event of a key; without them it is dropped.
        self._arrivals: weakref.WeakValueDictionary[str, asyncio.Event] = (
            weakref.WeakValueDictionary()
        )
        self._num_waiting = 0
        self._is_closed = False

    def get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def get_all(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of keys that are set."""
        values = [self._values[key] for key in keys]
        if (size := sum(map(len, values))) > MAX_ANSWER:
            raise JobError(f"a rendezvous gives {MAX_ANSWER} bytes of values at once, not {size}")
        return values

    async def wait_for(self, keys: Sequence[str]) -> None:
        """Wait until each key has a value."""
        if self._num_waiting >= MAX_WAITING:
            raise JobError(f"{MAX_WAITING} questions to the rendezvous are unanswered already")
        self._num_waiting += 1
        try:
            for key in reversed(keys):  # members come about in order: it is woken less often
                await self._wait_for(key)
        finally:
            self._num_waiting -= 1

    async def _wait_for(self, key: str) -> None:
        while key not in self._values:
            if self._is_closed:
                raise BusyError("the job ended while a worker waited for the others")
            arrival = self._arrivals.setdefault(key, asyncio.Event())
            await arrival.wait()

    def close(self) -> None:
        """Fail all requests that wait."""
        self._is_closed = True
        for key in list(self._arrivals):
            self._wake(key)

    def _wake(self, key: str) -> None:
        if (arrival := self._arrivals.pop(key, None)) is not None:
            arrival.set()

    def set(self, key: str, value: bytes) -> None:
        """Set a value."""
        if len(key) > MAX_KEY:
            raise JobError(f"a rendezvous takes no key of {len(key)} characters, {MAX_KEY} at most")
        if len(value) > MAX_VALUE:
            raise JobError(
                f"a rendezvous takes no value of {len(value)} bytes, {MAX_VALUE} at most"
            )
        held = self._values.get(key)
        grown = self._bytes + (_size(key, value) - (0 if held is None else _size(key, held)))
        if grown > MAX_BYTES or (held is None and len(self._values) >= MAX_KEYS):
            raise JobError("the rendezvous is full")
        self._values[key] = value
        self._bytes = grown
        self._wake(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its new value."""
        held = self._values.get(key, b"0")
        if not held.removeprefix(b"-").isdigit() or len(held) > _LONGEST:
            raise JobError("the value is no number")
        value = int(held) + amount
        if not -(2**63) <= value < 2**63:
            raise JobError(f"{value} is no number of 64 bits")
        self.set(key, str(value).encode())
        return value


def require_key_count(keys: Iterable[str]) -> None:
    """Refuse a request for no key, or for too many."""
    if not 1 <= (count := len(list(keys))) <= MAX_KEYS_PER_GET:
        raise JobError(f"a rendezvous answers no question for {count} keys")


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)


MAX_CALLS = 64
"""Calls of one worker under way; an agent makes one per thread."""


AGENT = re.compile(rb"uv://127(\.\d{1,3}){3}:\d{1,5}")
"""Where the agent of a worker in the same network listens."""


def _of_this_host(key: str, value: bytes) -> bytes:
    """Return a value; an address has to be this host's: another one's are reached by TLS alone.

    Raises:
        SecurityError: a server that says it is in this network gives another host's address.
    """
    if key.startswith("addrs/") and value and not AGENT.fullmatch(value):
        raise SecurityError(
            f"{key.removeprefix('addrs/')} says that it runs in this host's network, and gives the "
            f"address {value[:60].decode(errors='replace')!r}"
        )
    return value


class StoreProxy:
    """Makes the calls for a worker's `rpcmp.rpc.transport.ChannelStore`.

    Args:
        address: of the server that has the store: the first stage's.
        stage_index: what the certificate of that server has to be for.
        send: sends a message to the worker.
        dialled: where the worker is to dial members in other networks instead of at the addresses
            of their agents, HOST:PORT by name; see rpcmp.net.relay.
    """

    def __init__(
        self,
        address: str,
        stage_index: int,
        dialer: Dialer,
        job_id: str,
        generation: int,
        send: Callable[[Message], None],
        dialled: Mapping[str, str],
    ) -> None:
        self._instead = {
            f"addrs/{name}": f"uv://{address}".encode() for name, address in dialled.items()
        }
        self._client = StageClient("rendezvous", address, dialer, stage_index)
        self._job = {"job_id": job_id, "generation": generation}
        self._send = send
        self._asking: set[asyncio.Task[None]] = set()

    def handle(self, message: Message) -> None:
        """Make a call; the answer is sent to the worker.

        Raises:
            ValueError: the message is malformed, or more calls are under way than an agent makes.
        """
        if not isinstance(message.get("id"), int):
            raise ValueError("a question to the rendezvous has no number")
        if len(self._asking) >= MAX_CALLS:
            raise ValueError(f"it asks the rendezvous more than {MAX_CALLS} questions at once")
        task = asyncio.create_task(self._ask(message))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        """Cancel all calls."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._client.close()

    async def _ask(self, message: Message) -> None:
        answer: Message = {"op": "stored", "id": message["id"]}
        try:
            values = await self._call(message)
            answer["values"] = [base64.b64encode(value).decode() for value in values]
        except Exception as error:  # without an answer the child would wait for ever
            known = error if isinstance(error, RpcmpError) else JobError(one_line(error))
            answer["error"] = to_wire(known)
        self._send(answer)

    async def _call(self, message: Message) -> list[bytes]:
        keys = message["keys"]
        match message["call"]:
            case "set":
                value = await self._client.store_set(self._job, keys[0], _data(message["value"]))
            case "compare_set":
                expected, desired = _data(message["expected"]), _data(message["value"])
                value = await self._client.store_compare_set(self._job, keys[0], expected, desired)
            case "add":
                value = await self._client.store_add(self._job, keys[0], message["amount"])
            case _:
                values = await self._client.store_get(self._job, keys)
                pairs = zip(keys, values, strict=True)
                return [self._instead.get(key) or _of_this_host(key, value) for key, value in pairs]
        return [value]


def _data(text: str) -> bytes:
    return base64.b64decode(text)
