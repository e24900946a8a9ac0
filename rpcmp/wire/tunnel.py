"""gRPC to a stage server, through a connection whose TLS is ours.

gRPC cannot be told to insist on TLS 1.3, to look for a role in a certificate, or to ask whose a
server is. So its channel ends at a Unix socket in this process, in a folder that only its user can
look into, and what it sends there goes on over a connection of the Dialer. That has our
certificate, so only this very process may connect: no other one of its user, such as a worker that
runs a job's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import struct

from rpcmp import scratch
from rpcmp.errors import RpcmpError, SecurityError
from rpcmp.wire.accept import connections
from rpcmp.wire.credentials import GRPC
from rpcmp.wire.dialer import Dialer
from rpcmp.wire.end import End, refusal
from rpcmp.wire.splice import splice

PREFIX = "rpcmp-tunnel-"

_CREDENTIALS = struct.Struct("iII")
"""See `struct ucred` in unix(7): process, user, group."""

log = logging.getLogger(__name__)


class Tunnel:
    """A Unix socket that leads to one stage server. Made in an event loop; closed by `close`.

    Args:
        dialer: opens the connections.
        address: HOST:PORT of the server.
        stage_index: of the stage that it has to be; None: any.

    Attributes:
        refused: done as soon as the server has turned out not to be who it should be, or has
            refused us, with the error.
        absent: done as soon as the host has said that nobody listens there, with the error; of a
            server that is starting it may not be the last word.
        failure: why the last attempt to reach the server failed; None: none has.
    """

    def __init__(self, dialer: Dialer, address: str, stage_index: int | None) -> None:
        self._dialer, self._address, self._stage_index = dialer, address, stage_index
        self._folder = scratch.create(PREFIX)
        self._path = self._folder / "socket"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._listener.setblocking(False)
        self.refused: asyncio.Future[SecurityError] = asyncio.get_running_loop().create_future()
        self.absent: asyncio.Future[RpcmpError] = asyncio.get_running_loop().create_future()
        self.failure: RpcmpError | None = None
        self._carrying: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    @property
    def target(self) -> str:
        """What a gRPC channel connects to."""
        return f"unix:{self._path}"

    async def close(self) -> None:
        """End all connections."""
        tasks = [self._accepting, *self._carrying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        scratch.remove(self._folder)
        self.refused.cancel()
        self.absent.cancel()

    async def _accept(self) -> None:
        async for connection in connections(self._listener):
            if (pid := _pid_of_peer(connection)) != os.getpid():
                log.warning("process %d has tried to reach %s by our socket", pid, self._address)
                connection.close()
                continue
            task = asyncio.create_task(self._carry(End(connection)))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, here: End) -> None:
        try:
            there = await self._dialer.open(self._address, GRPC, self._stage_index)
        except RpcmpError as error:
            here.close()
            self.failure = error
            if isinstance(error, SecurityError):
                self._refuse(error)
            elif isinstance(error.__cause__, ConnectionRefusedError) and not self.absent.done():
                self.absent.set_result(error)
            return
        with contextlib.suppress(RpcmpError):
            try:
                await splice(here, there)
            except (
                ssl.SSLError
            ) as error:  # of TLS 1.3 the first thing read says whether we are let in
                if there.session is not None and not there.session.has_received:
                    self._refuse(SecurityError(f"{self._address} refuses us: {refusal(error)}"))
            except OSError:  # it is gone, and gRPC will see that
                pass

    def _refuse(self, error: SecurityError) -> None:
        self.failure = error
        if not self.refused.done():
            self.refused.set_result(error)


def _pid_of_peer(connection: socket.socket) -> int:
    """The process that has connected; 0 if it is outside of this one's pid namespace.

    The kernel notes the process and not the thread, and gives its id as this process sees it.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int
    pid, _, _ = _CREDENTIALS.unpack(found)
    return pid
