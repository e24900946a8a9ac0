"""A contestant of several processes with one thread each; rank.py is one of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from rpcmp.errors import WorkerDiedError, from_wire
from rpcmp.process import interpreter
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.interpreter import compute_environment
from rpcmp.tools.bench.comparison import TimedSegment
from tests.support.places import ROOT


class Ranks:
    """Contestant whose processes get the same requests at the same time.

    Args:
        name: shown beside its figures.
        num_ranks: how many processes.
        order: what each is told at its start, besides its rank; see rank.py.
    """

    def __init__(self, name: str, num_ranks: int, order: Message) -> None:
        self.name = name
        self.settings: Mapping[str, str | int] = {"processes": num_ranks}
        self._num_ranks = num_ranks
        self._order = order
        self._children: list[Child] = []
        self._messages: list[AsyncIterator[Message]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> None:
        """See Contestant."""
        self._folder = tempfile.TemporaryDirectory(prefix="rpcmp-bench-")
        store = str(Path(self._folder.name) / "store")
        for rank in range(self._num_ranks):
            child = await Child.spawn("tests.benchmarks.rank", _environment())
            self._children.append(child)
            self._messages.append(child.messages())
            place = {"rank": rank, "world_size": self._num_ranks, "store": store}
            child.send({**self._order, **place})
        await self._answers()

    async def run(self, steps: int) -> TimedSegment:
        """See Contestant; measures from the first rank's start to the last one's end."""
        for child in self._children:
            child.send({"steps": steps})
        answers = await self._answers()
        begin, end = min(a["begin"] for a in answers), max(a["end"] for a in answers)
        losses = [sum(of_step) for of_step in zip(*(a["losses"] for a in answers), strict=True)]
        return TimedSegment((end - begin) / 1e9 / steps, losses)

    async def close(self) -> None:
        """See Contestant."""
        await asyncio.gather(*(child.kill() for child in self._children))
        if self._folder is not None:
            self._folder.cleanup()

    async def _answers(self) -> list[Message]:
        """Return one answer per process, by rank.

        Raises:
            RpcmpError: one of them failed.
        """
        return await asyncio.gather(*map(self._answer, range(self._num_ranks)))

    async def _answer(self, rank: int) -> Message:
        async for message in self._messages[rank]:
            if message["event"] == "error":
                raise from_wire(message["error"])
            return message
        how = interpreter.describe_exit(self._children[rank].exit_code)
        raise WorkerDiedError(f"{self.name}: the process of rank {rank} {how}")


def _environment() -> dict[str, str]:
    """One thread, Gloo on the loopback interface, and these modules."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**compute_environment(1), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
