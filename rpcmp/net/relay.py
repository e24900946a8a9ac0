"""The relay: supervisors carry torch RPC's connections from host to host.

    worker 0 ──loopback──> supervisor 0 ══TLS══> supervisor 1 ──loopback──> worker 1
                           (listens at worker 1's                           (worker 1 listens)
                            very address and port)

An agent listens on the loopback of its own network and nowhere else. When an agent connects to it,
it sends its own address, and is dialled again at that. So a supervisor listens for its worker at
the same address and port that the other worker has on its host, and carries each connection to it.
The first frame names the member and the generation. Data from the other side is inspected before
the worker gets it, see `rpcmp.net.rpc_inspection`.

A driver may be behind NAT, where no server can connect to it. It keeps one connection open to every
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
from rpcmp.net.connection_limits import connections
from rpcmp.net.identity import RELAY, Role
from rpcmp.net.local_peer import require_answers, require_same_user
from rpcmp.net.peer_connection import Dialer, PeerConnection
from rpcmp.net.port import IncomingConnection
from rpcmp.net.rpc_inspection import Inspection, Pipes
from rpcmp.net.security import is_loopback
from rpcmp.net.tunnel import splice
from rpcmp.process import sockets
from rpcmp.process.fork_client import Forks

RETRY_SECONDS = 0.5

ASK_SECONDS = 5.0
"""Time limit for the kernel to tell the owner of a connection."""

MAX_WAITING = 8
"""Connections that a driver may keep open for a worker."""

MAX_OPEN = 16
"""Connections that one peer may have open to the worker; an agent opens three."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RelayPeer:
    """A member of the group that is in another network.

    Attributes:
        name: its RPC name.
        listens: HOST:PORT of its agent, on its own loopback.
        server: HOST:PORT of its stage server; empty for the driver, which has none.
        stage_index: the stage of that server.
    """

    name: str
    listens: str
    server: str = ""
    stage_index: int | None = None

    @property
    def label(self) -> str:
        """Its name in errors."""
        return f"{self.name} at {self.server}" if self.server else self.name

    def may_be(self, role: Role | None) -> bool:
        """Return whether a certificate's role may be this member; None without certificates."""
        if role is None:
            return True
        return role.may_serve(self.stage_index) if self.server else role.is_driver


class Relay:
    """Carries the connections of one member of one generation.

    Args:
        job_id, generation: connections of others are refused.
        name: RPC name of the member.
        forks: has sockets in the member's network.
        dialer: opens connections to servers.
        refused: called, before the connection ends, when a peer has sent a message that the
            protocol does not allow: the job must end.
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
        self._waiting: asyncio.Queue[PeerConnection] = asyncio.Queue(MAX_WAITING)
        self._is_shared = False
        self._is_closed = False
        self._has_warned = False
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Future[None]] = set()
        self._carried: dict[PeerConnection, str] = {}
        self._open: Counter[str] = Counter()

    @property
    def round_trips(self) -> dict[str, float]:
        """Seconds of a round trip to each connected peer's host, by the address of its agent."""
        found: dict[str, float] = {}
        for end, peer in self._carried.items():
            if (seen := sockets.info(end.socket.fileno())) is not None:
                found[peer] = min(seen.round_trip_s, found.get(peer, seen.round_trip_s))
        return found

    async def open(self, own: str, peers: Sequence[RelayPeer]) -> None:
        """Start to listen.

        Args:
            own: HOST:PORT of the member's agent.
            peers: all members that it cannot reach by itself.

        Raises:
            WorkerDiedError: an address is taken.
            SecurityError: a peer listens where other hosts can reach it; or other users can reach
                our listeners, and the kernel does not tell the owners of connections.
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
        """As the driver: keep a connection open for the worker of a stage to use."""
        self._spawn(self._keep_waiting(stage))

    async def take(self, incoming: IncomingConnection, greeting: Mapping[str, Any]) -> None:
        """Serve an incoming connection until it ends.

        Args:
            greeting: its first frame.

        Raises:
            RelayError, OSError: it broke.
        """
        if {key: greeting.get(key) for key in self._greeting} != self._greeting or not self._own:
            raise RelayError("it is of a group that does not run here")
        self._require_open()
        incoming.end.has_frames = True
        serving = self._spawn(self._serve(incoming, greeting))
        try:
            await asyncio.wait([serving])
        finally:
            serving.cancel()
        if not serving.cancelled() and (error := serving.exception()) is not None:
            raise error

    async def _serve(self, incoming: IncomingConnection, greeting: Mapping[str, Any]) -> None:
        peer = self._member(incoming, greeting)
        if greeting.get("op") != "wait":
            if self._open[peer.name] >= MAX_OPEN:  # each may have a message in our memory
                raise RelayError(f"{peer.label} has {MAX_OPEN} connections here already")
            self._open[peer.name] += 1
            try:
                await self._connect(incoming.end, peer)
            finally:
                self._open[peer.name] -= 1
        elif peer.server:
            raise RelayError(f"{peer.name} has nothing to wait for")
        else:
            await self._park(incoming.end)

    def _member(self, incoming: IncomingConnection, greeting: Mapping[str, Any]) -> RelayPeer:
        """Return the member of the group that has opened a connection."""
        peer = self._peers.get(str(greeting.get("from")))
        if peer is None:
            raise RelayError(f"{incoming.name} names no peer of {self._name}")
        if not peer.may_be(incoming.role):
            raise RelayError(f"{incoming.name} may not speak for {peer.name}")
        return peer

    async def close(self) -> None:
        """Stop listening and break all connections."""
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
        """Carry the connections that our worker opens to a peer's address."""
        async for connection in connections(listener):
            # One after the other: what comes meanwhile waits in the kernel, and takes nothing here.
            if not self._is_shared or await self._is_ours(connection, peer):
                self._spawn(self._pass_on(PeerConnection(connection), peer))

    async def _is_ours(self, connection: socket.socket, peer: RelayPeer) -> bool:
        """Return whether our own user has opened a connection; close it otherwise."""
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

    async def _pass_on(self, here: PeerConnection, peer: RelayPeer) -> None:
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

    async def _reach(self, peer: RelayPeer) -> PeerConnection:
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

    async def _dial(self, server: str, stage_index: int | None, op: str) -> PeerConnection:
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

    async def _park(self, end: PeerConnection) -> None:
        """Keep a driver's connection until our worker connects to the driver."""
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
                # A lost host is reported by its supervisor, a refusal only here.
                if isinstance(error, SecurityError):
                    log.warning("the worker of %s cannot reach the driver: %s", stage.server, error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._spawn(self._come(there, stage))

    async def _come(self, there: PeerConnection, peer: RelayPeer) -> None:
        with contextlib.suppress(OSError, RpcmpError):
            await self._connect(there, peer)

    async def _connect(self, there: PeerConnection, peer: RelayPeer) -> None:
        """Carry a connection from another host to our own worker."""
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
        await _carry(PeerConnection(connection), there, self._pipes.inspect(peer.name, peer.label))


async def _carry(here: PeerConnection, there: PeerConnection, inspection: Inspection) -> None:
    """Carry until one end is gone; the agents notice that by themselves."""
    try:
        with contextlib.suppress(OSError, RelayError, SecurityError):  # the last is reported
            await splice(here, there, inspection)
    finally:
        inspection.close()
