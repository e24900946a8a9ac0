"""A job that takes calls from its user's program, over as many generations as it takes.

The counterpart of `job.run`, where the caller and not the driver process knows what comes next: it
repeats the calls that the new group has not seen.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Sequence
from typing import Any

from rpcmp.config import Config
from rpcmp.errors import ConfigError, RpcmpError
from rpcmp.job.begin import Begin, from_memory
from rpcmp.job.fleet import Fleet
from rpcmp.job.recovery import History, decide
from rpcmp.job.restore import Holdings, newest_common
from rpcmp.job.session import Session

EXPLAIN_SECONDS = 5.0
"""A driver process that is gone says nothing; how long to wait for the reason."""


class Service:
    """The group of a pipeline, and what becomes of it.

    Args:
        config: the job.
        connect: addresses of running stage servers; see Fleet.
    """

    def __init__(self, config: Config, connect: Sequence[str] | None) -> None:
        self._config = config
        self._fleet = Fleet(config, connect)
        self._session: Session | None = None
        self._generation = 1
        self._history = History()
        self._recovering: asyncio.Task[Any] | None = None

    @property
    def draining(self) -> str:
        """The name of a stage whose server is being stopped; empty: none."""
        return self._session.draining if self._session is not None else ""

    async def start(self, connection: socket.socket) -> None:
        """Form the first group.

        Args:
            connection: where the driver process gets its calls from.

        Raises:
            RpcmpError: why it cannot be formed; nothing is left running.
        """
        try:
            await self._fleet.open()
            await self._form(connection, {0: {}})
        except BaseException:
            await self.close()
            raise

    async def recover(
        self,
        error: RpcmpError,
        connection: socket.socket,
        known: dict[int, dict[str, Any]],
        is_new: bool,
    ) -> int:
        """Form the next group after `error`; the number of the last call that it knows of.

        Args:
            connection: where the driver process gets its calls from.
            known: what the driver was after each of the calls that can be gone on from.
            is_new: whether any call has ended since this was last asked.

        Raises:
            RpcmpError: there will be no other group.
        """
        if is_new:
            self._history = History(raised=self._history.raised)
        self._recovering = asyncio.current_task()
        while True:
            if self._session is not None:
                await self._session.close()
            limit = self._config.recovery.max_restarts
            decision = decide(error, self._history, limit, has_begun=True)
            self._history = decision.history
            if decision.error is not None:
                raise decision.error
            await asyncio.sleep(decision.pause)
            await self._fleet.wait_until_ready()
            self._generation += 1
            try:
                return await self._form(connection, known)
            except RpcmpError as another:
                error = another

    async def end(self) -> None:
        """Wait until the group has ended by itself, and free all servers."""
        try:
            if self._recovering is not None and not self._recovering.done():
                self._recovering.cancel()
                await asyncio.gather(self._recovering, return_exceptions=True)
            elif self._session is not None:
                await self._session.wait_for_end()
        finally:
            await self.close()

    async def close(self) -> None:
        """End whatever still runs and free all servers."""
        if self._session is not None:
            await self._session.close()
        await self._fleet.free(self._generation)

    async def reason(self) -> RpcmpError | None:
        """Why the group is gone, where somebody knows."""
        return None if self._session is None else await self._session.reason(EXPLAIN_SECONDS)

    async def _form(self, connection: socket.socket, known: dict[int, dict[str, Any]]) -> int:
        fd = connection.fileno()

        async def choose(assignments: list[str], holdings: dict[str, Holdings]) -> Begin:
            return self._choose(known, holdings)

        self._session = Session(
            self._config,
            self._fleet,
            self._generation,
            load_data=False,
            fds=[fd],
            choose=choose,
        )
        await self._session.start()
        begin = self._session.begin.step
        self._session.send({"op": "serve", "state": known.get(begin, {}), "kept": begin})
        self._session.end_on_failure()
        return begin

    def _choose(self, known: Collection[int], holdings: dict[str, Holdings]) -> Begin:
        found = newest_common(self._config.workers, holdings, known)
        if found is None and 0 not in known:
            raise ConfigError("no server holds any more what the pipeline was; launch it again")
        return Begin() if found is None else from_memory(found, self._config, self._fleet)
