"""Tensors from host to host: torch RPC's connections, carried by the supervisors.

    worker 0 ──loopback──> supervisor 0 ══TLS══> supervisor 1 ──loopback──> worker 1
             (listens at worker 1's                           (worker 1 listens)
              very address and port)

An agent listens on the loopback of its own network and nowhere else. When it is connected to, it
tells its own address and is dialled again at that, so a supervisor listens for its worker at the
same address and port that the other worker has on its host, and passes on what comes there. Every
connection of an agent is one of the relay, from port to port; which member of which generation it
is for stands in its first frame. What comes from the other side is inspected before the worker gets
it, see `rpcmp.net.rpc_inspection`.

A driver may be where nobody can connect to, behind NAT. It keeps one connection open to every
server, for the next time that the worker there connects to the driver's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcmp.config.addresses import parse
from rpcmp.errors import JobError, RelayError, RpcmpError, SecurityError, WorkerDiedError
from rpcmp.net.accept import connections
from rpcmp.net.dialer import Dialer
from rpcmp.net.identity import RELAY, Role
from rpcmp.net.local_peer import require_answers, require_same_user
from rpcmp.net.port import IncomingConnection
from rpcmp.net.rpc_inspection import Inspection, Pipes
from rpcmp.net.security import is_loopback
from rpcmp.net.splice import splice
from rpcmp.net.tls import Connection
from rpcmp.process import sockets
from rpcmp.process.fork_client import Forks

RETRY_SECONDS = 0.5

ASK_SECONDS = 5.0
"""How long the kernel may take to say whose a connection is."""

MAX_WAITING = 8
"""Connections that a driver may keep open for a worker to come."""

MAX_OPEN = 16
"""Connections that one peer may have open to the worker; an agent opens three."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RelayPeer:
    """A member of the group that is in another network.

    Attributes:
        name: its RPC name.
        listens: HOST:PORT of its agent, on its own loopback.
        server: HOST:PORT of its stage server; empty: it is the driver, which has none.
        stage_index: which stage that serves.
    """

    name: str
    listens: str
    server: str = ""
    stage_index: int | None = None

    @property
    def label(self) -> str:
        """What it is called in errors."""
        return f"{self.name} at {self.server}" if self.server else self.name

    def may_be(self, role: Role | None) -> bool:
        """Whether a certificate's role allows to be this member; None: there are none."""
        if role is None:
            return True
        return role.may_serve(self.stage_index) if self.server else role.is_driver


class Relay:
    """Carries the connections of one member of one generation.

    Args:
        job_id, generation: whose; nobody else's are carried.
        name: RPC name of the member.
        forks: has sockets in the member's network.
        dialer: opens connections to servers.
        refused: called when a peer has sent what is no message of the protocol, before its
            connection ends: the job must.
    """

    def __init__(
        self,
        job_id: str,
        generation: int,
        name: str,
        forks: Forks,
        dialer: Dialer,
        refused: Callable[[SecurityError], None],
    ) -> None:
        self._greeting = {"job_id": job_id, "generation": generation}
        self._name = name
        self._forks, self._dialer = forks, dialer
        self._pipes = Pipes(refused)
        self._own = ""
        self._peers: dict[str, RelayPeer] = {}
        self._waiting: asyncio.Queue[Connection] = asyncio.Queue(MAX_WAITING)
        self._is_shared = False
        self._is_closed = False
        self._has_warned = False
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Future[None]] = set()
        self._carried: dict[Connection, str] = {}
        self._open: Counter[str] = Counter()

    @property
    def round_trips(self) -> dict[str, float]:
        """Seconds to each peer's host and back, by where its agent listens; of those in use."""
        found: dict[str, float] = {}
        for end, peer in self._carried.items():
            if (seen := sockets.info(end.socket.fileno())) is not None:
                found[peer] = min(seen.round_trip_s, found.get(peer, seen.round_trip_s))
        return found

    async def open(self, own: str, peers: Sequence[RelayPeer]) -> None:
        """Carry from now on.

        Args:
            own: HOST:PORT of the member's agent.
            peers: all others that it cannot reach by itself.

        Raises:
            WorkerDiedError: an address is taken.
            SecurityError: a peer says that it listens where others than its host's reach it; or
                other users reach our listeners, and the kernel does not say whose a connection is.
        """
        for peer in peers:
            if not is_loopback(parse(peer.listens)[0]):
                raise SecurityError(
                    f"a peer says that it listens at {peer.listens}, for all to see"
                )
        self._is_shared = not (await self._forks.network()).is_private
        self._own = own
        self._peers = {peer.name: peer for peer in peers}
        for peer in peers:
            try:
                listener = await self._forks.listener(*parse(peer.listens))
            except JobError as error:
                raise WorkerDiedError(
                    f"cannot listen on {peer.listens} for a peer: {error}; fresh processes will "
                    "have other ports"
                ) from error
            listener.setblocking(False)
            self._listeners.append(listener)
            if self._is_shared:
                require_answers(listener)
            self._require_open()
            self._spawn(self._listen(listener, peer))

    def wait_for(self, stage: RelayPeer) -> None:
        """Keep a connection open for the worker of a stage to come to us, who are the driver."""
        self._spawn(self._keep_waiting(stage))

    async def take(self, visitor: IncomingConnection, greeting: Mapping[str, Any]) -> None:
        """Serve a connection that somebody has opened to our server, until it ends.

        Args:
            greeting: what it began with.

        Raises:
            RelayError, OSError: it broke.
        """
        if {key: greeting.get(key) for key in self._greeting} != self._greeting or not self._own:
            raise RelayError("it is of a group that does not run here")
        self._require_open()
        visitor.end.has_frames = True
        serving = self._spawn(self._serve(visitor, greeting))
        try:
            await asyncio.wait([serving])
        finally:
            serving.cancel()
        if not serving.cancelled() and (error := serving.exception()) is not None:
            raise error

    async def _serve(self, visitor: IncomingConnection, greeting: Mapping[str, Any]) -> None:
        peer = self._member(visitor, greeting)
        if greeting.get("op") != "wait":
            if self._open[peer.name] >= MAX_OPEN:  # each may have a message in our memory
                raise RelayError(f"{peer.label} has {MAX_OPEN} connections here already")
            self._open[peer.name] += 1
            try:
                await self._connect(visitor.end, peer)
            finally:
                self._open[peer.name] -= 1
        elif peer.server:
            raise RelayError(f"{peer.name} has nothing to wait for")
        else:
            await self._park(visitor.end)

    def _member(self, visitor: IncomingConnection, greeting: Mapping[str, Any]) -> RelayPeer:
        """The member of the group that a visitor speaks for.

        Raises:
            RelayError: there is none of that name here, or the certificate is another's.
        """
        peer = self._peers.get(str(greeting.get("from")))
        if peer is None:
            raise RelayError(f"{visitor.name} names no peer of {self._name}")
        if not peer.may_be(visitor.role):
            raise RelayError(f"{visitor.name} may not speak for {peer.name}")
        return peer

    async def close(self) -> None:
        """Carry nothing more; all connections break."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        while not self._waiting.empty():
            self._waiting.get_nowait().close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise RelayError("the group has ended")

    def _spawn(self, work: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(self, listener: socket.socket, peer: RelayPeer) -> None:
        """Pass on what our worker sends to where it believes a peer to be."""
        async for connection in connections(listener):
            # One after the other: what comes meanwhile waits in the kernel, and takes nothing here.
            if not self._is_shared or await self._is_ours(connection, peer):
                self._spawn(self._pass_on(Connection(connection), peer))

    async def _is_ours(self, connection: socket.socket, peer: RelayPeer) -> bool:
        """Return whether our own user has opened a connection; closes it otherwise."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await require_same_user(connection)
        except (SecurityError, TimeoutError) as error:
            connection.close()
            if not self._has_warned:  # once, or any user could fill the log
                self._has_warned = True
                where = peer.server or "the driver"
                log.warning("refused a connection on this host to reach %s: %s", where, error)
            return False
        except BaseException:
            connection.close()
            raise
        return True

    async def _pass_on(self, here: Connection, peer: RelayPeer) -> None:
        try:
            there = await self._reach(peer)
        except (RpcmpError, OSError, EOFError) as error:
            log.warning("cannot carry to %s: %s", peer.server or "the driver", error)
            here.abort()
            return
        except BaseException:
            here.abort()
            raise
        self._carried[there] = peer.listens
        try:
            await _carry(here, there, self._pipes.inspect(peer.name, peer.label, peer.listens))
        finally:
            del self._carried[there]

    async def _reach(self, peer: RelayPeer) -> Connection:
        while not peer.server:
            there = await self._waiting.get()
            try:
                await there.write_message({"go": True})
            except OSError:  # the driver's network has changed meanwhile, and it has opened another
                there.abort()
            except BaseException:
                there.abort()
                raise
            else:
                return there
        return await self._dial(peer.server, peer.stage_index, "connect")

    async def _dial(self, server: str, stage_index: int | None, op: str) -> Connection:
        there = await self._dialer.open(server, RELAY, stage_index)
        try:
            await there.write_message({**self._greeting, "op": op, "from": self._name})
            if op == "wait":
                await there.read_message()
        except BaseException:
            there.abort()
            raise
        there.has_frames = True
        return there

    async def _park(self, end: Connection) -> None:
        """Keep a driver's connection until our worker wants to reach it."""
        if self._waiting.full():  # of a driver whose network comes and goes
            self._waiting.get_nowait().abort()
        self._waiting.put_nowait(end)
        # Whoever takes it owns the connection; this one task must not close it meanwhile.
        await end.gone.wait()

    async def _keep_waiting(self, stage: RelayPeer) -> None:
        while True:
            try:
                there = await self._dial(stage.server, stage.stage_index, "wait")
            except (RpcmpError, OSError, EOFError) as error:
                # Of a host that is lost the supervisors know; of one that refuses us nobody else.
                if isinstance(error, SecurityError):
                    log.warning("the worker of %s cannot reach the driver: %s", stage.server, error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._spawn(self._come(there, stage))

    async def _come(self, there: Connection, peer: RelayPeer) -> None:
        with contextlib.suppress(OSError, RpcmpError):
            await self._connect(there, peer)

    async def _connect(self, there: Connection, peer: RelayPeer) -> None:
        """Pass on to our own worker what comes from elsewhere."""
        try:
            connection = await self._forks.connectable()
        except BaseException:
            there.abort()
            raise
        try:
            connection.setblocking(False)
            await asyncio.get_running_loop().sock_connect(connection, parse(self._own))
        except BaseException:
            connection.close()
            there.abort()
            raise
        await _carry(Connection(connection), there, self._pipes.inspect(peer.name, peer.label))


async def _carry(here: Connection, there: Connection, inspection: Inspection) -> None:
    """Carry until one of them is gone; the agents see that by themselves."""
    try:
        with contextlib.suppress(OSError, RelayError, SecurityError):  # the last is reported
            await splice(here, there, inspection)
    finally:
        inspection.close()
