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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Self

from rpcmp.errors import BusyError, JobError, RpcmpError, one_line, to_wire
from rpcmp.net.dialer import Dialer
from rpcmp.process.channel import Message
from rpcmp.server.client import StageClient
from rpcmp.server.hardened_grpc import Callers
from rpcmp.server.services import answers_errors
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import control_pb2_grpc

if TYPE_CHECKING:
    from rpcmp.server.claim import Claim
    from rpcmp.server.hardened_grpc import GrpcContext
    from rpcmp.server.stage_server import StageServer

    Job = pb.SetRequest | pb.GetRequest | pb.CompareSetRequest | pb.AddRequest

MAX_KEY = 4096
"""Characters. Workers' names are in there, and stages' names in these."""

MAX_VALUE = 32 * 1024
"""Bytes; an agent's address has some hundred."""

MAX_KEYS = 16 * 1024
"""For groups of a thousand: an agent has a few."""

MAX_BYTES = 16 * 2**20
"""Of all keys and values together."""

MAX_ASKED = 1024
"""Keys that one question may name."""

MAX_WAITING = 16 * 1024
"""Questions for keys that nobody has set yet."""

_LONGEST = len(str(-(2**63)))


class KeyValueStore:
    """A key-value store with bounds, in one event loop.

    Who waits for a key is woken by that key alone: in a group of a thousand each waits for each.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by key
        self._num_waiting = 0
        self._is_closed = False

    def get(self, key: str) -> bytes | None:
        """A value; None where there is none."""
        return self._values.get(key)

    async def wait_for(self, keys: Iterable[str]) -> None:
        """Return when there is a value for each key.

        Raises:
            BusyError: the job ended first.
            JobError: too many wait already.
        """
        if self._num_waiting >= MAX_WAITING:
            raise JobError(f"{MAX_WAITING} questions to the rendezvous are unanswered already")
        self._num_waiting += 1
        try:
            for key in keys:
                await self._wait_for(key)
        finally:
            self._num_waiting -= 1

    async def _wait_for(self, key: str) -> None:
        while key not in self._values:
            if self._is_closed:
                raise BusyError("the job ended while a worker waited for the others")
            wait = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(key, {})
            waiting[wait] = None
            try:
                await wait
            finally:
                waiting.pop(wait, None)
                if not waiting and self._waiting.get(key) is waiting:
                    del self._waiting[key]

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._is_closed = True
        for key in list(self._waiting):
            self._wake(key)

    def _wake(self, key: str) -> None:
        for wait in self._waiting.pop(key, {}):
            if not wait.done():
                wait.set_result(None)

    def set(self, key: str, value: bytes) -> None:
        """Set a value.

        Raises:
            JobError: it is too large, or there are too many.
        """
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
        """Add to a value that counts; what it is then.

        Raises:
            JobError: it does not count, or beyond 64 bits.
        """
        held = self._values.get(key, b"0")
        if not held.removeprefix(b"-").isdigit() or len(held) > _LONGEST:
            raise JobError("the value is no number")
        value = int(held) + amount
        if not -(2**63) <= value < 2**63:
            raise JobError(f"{value} is no number of 64 bits")
        self.set(key, str(value).encode())
        return value


def require_askable(keys: Iterable[str]) -> None:
    """Refuse a question for no key, or for too many.

    Raises:
        JobError: it is one.
    """
    if not 1 <= (count := len(list(keys))) <= MAX_ASKED:
        raise JobError(f"a rendezvous answers no question for {count} keys")


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)


class RendezvousServicer(control_pb2_grpc.RendezvousServicer):
    """See protos/rpcmp/v1/control.proto. The values go with the claim."""

    def __init__(self, server: StageServer, callers: Callers) -> None:
        self._server, self._callers = server, callers

    def _claim_of(self, job: Job, grpc_context: GrpcContext) -> Claim:
        """The current claim, whose group the caller must belong to."""
        role = self._callers.role(grpc_context.peer())
        claim = self._server.claimed_by(job.job_id, job.generation)
        claim.group.require_member(role, "use the rendezvous")
        return claim

    def _require_own(self, claim: Claim, key: str, value: bytes, grpc_context: GrpcContext) -> None:
        """Refuse a member that would give another's address, or be at another's rank.

        No agent asks who it has reached at an address: torch's agents store theirs under
        "addrs/NAME", and their names under "names/RANK".

        Raises:
            SecurityError: the caller's certificate is for neither that member nor the driver.
        """
        kind, _, rest = key.partition("/")
        if kind in ("addrs", "names"):
            name = rest if kind == "addrs" else value.decode(errors="replace")
            claim.group.require_name(self._callers.role(grpc_context.peer()), name)

    @answers_errors
    async def Set(self, request: pb.SetRequest, grpc_context: GrpcContext) -> pb.SetResponse:
        claim = self._claim_of(request, grpc_context)
        self._require_own(claim, request.key, request.value, grpc_context)
        claim.values.set(request.key, request.value)
        return pb.SetResponse(generation=claim.generation)

    @answers_errors
    async def Get(self, request: pb.GetRequest, grpc_context: GrpcContext) -> pb.GetResponse:
        claim = self._claim_of(request, grpc_context)
        require_askable(request.keys)
        await claim.values.wait_for(request.keys)
        value = claim.values.get(request.keys[0])
        return pb.GetResponse(generation=claim.generation, value=value or b"")

    @answers_errors
    async def CompareSet(
        self, request: pb.CompareSetRequest, grpc_context: GrpcContext
    ) -> pb.CompareSetResponse:
        claim = self._claim_of(request, grpc_context)
        self._require_own(claim, request.key, request.desired, grpc_context)
        held = claim.values.get(request.key)
        if (held or b"") == request.expected:
            held = request.desired
            claim.values.set(request.key, held)
        return pb.CompareSetResponse(generation=claim.generation, value=held or b"")

    @answers_errors
    async def Add(self, request: pb.AddRequest, grpc_context: GrpcContext) -> pb.AddResponse:
        claim = self._claim_of(request, grpc_context)
        self._require_own(claim, request.key, b"", grpc_context)
        value = claim.values.add(request.key, request.amount)
        return pb.AddResponse(generation=claim.generation, value=value)


MAX_ASKING = 64
"""Questions of one child under way; an agent has one on each of its threads."""


class StoreProxy:
    """Passes on what a child's `rpcmp.rpc.store.ChannelStore` asks; its other end.

    Args:
        client: of the server that serves the store; owned from now on.
        job_id, generation: whose store.
        tell: tells the child.
    """

    def __init__(
        self, client: StageClient, job_id: str, generation: int, tell: Callable[[Message], None]
    ) -> None:
        self._client = client
        self._job = {"job_id": job_id, "generation": generation}
        self._tell = tell
        self._asking: set[asyncio.Task[None]] = set()

    @classmethod
    def at(
        cls,
        address: str,
        dialer: Dialer,
        job_id: str,
        generation: int,
        tell: Callable[[Message], None],
    ) -> Self:
        """The proxy of the store at `address`, which the server of the first stage has."""
        client = StageClient("rendezvous", address, dialer, stage_index=0)
        return cls(client, job_id, generation, tell)

    def heard(self, message: Message) -> None:
        """Pass on one question; the child is told the answer.

        Raises:
            ValueError: it is no question, or more are under way than an agent ever has.
        """
        if not isinstance(message.get("id"), int):
            raise ValueError("a question to the rendezvous has no number")
        if len(self._asking) >= MAX_ASKING:
            raise ValueError(f"it asks the rendezvous more than {MAX_ASKING} questions at once")
        task = asyncio.create_task(self._ask(message))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        """Ask nothing more."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._client.close()

    async def _ask(self, message: Message) -> None:
        answer: Message = {"op": "stored", "id": message["id"]}
        try:
            value = await self._call(message)
            answer["value"] = base64.b64encode(value).decode()
        except Exception as error:  # without an answer the child would wait for ever
            known = error if isinstance(error, RpcmpError) else JobError(one_line(error))
            answer["error"] = to_wire(known)
        self._tell(answer)

    async def _call(self, message: Message) -> bytes:
        keys = message["keys"]
        match message["call"]:
            case "set":
                return await self._client.store_set(self._job, keys[0], _data(message["value"]))
            case "compare_set":
                expected, desired = _data(message["expected"]), _data(message["value"])
                return await self._client.store_compare_set(self._job, keys[0], expected, desired)
            case "add":
                return await self._client.store_add(self._job, keys[0], message["amount"])
            case _:
                return await self._client.store_get(self._job, keys)


def _data(text: str) -> bytes:
    return base64.b64decode(text)
