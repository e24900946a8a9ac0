"""The rendezvous of a group on behalf of a child, which has no connection to other hosts itself."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Self

from rpcmp.errors import JobError, RpcmpError, one_line, to_wire
from rpcmp.net.dialer import Dialer
from rpcmp.process.channel import Message
from rpcmp.server.client import StageClient

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
