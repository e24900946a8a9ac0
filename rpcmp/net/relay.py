"""The relay: supervisors carry torch RPC's connections from host to host.

    worker 0 ──loopback──> supervisor 0 ══TLS══> supervisor 1 ──loopback──> worker 1
              dials port a  listens at a,         dials port b   listens at b
                            for worker 0 alone

An agent listens on the loopback of its own network and nowhere else. So for each member in another
network a supervisor listens at a port of its own, and carries each connection to that member. Its
worker finds this port in place of the member's address twice: in the rendezvous, and in the
member's answer to a first connection, which says where to dial the next ones. Several members of a
group may have one network, as on a host that makes no private ones: a port tells whose connection
it is. The first frame names the member and the generation. Data from the other side is inspected
before the worker gets it, see `rpcmp.net.rpc_inspection`.

A driver may be behind NAT, where no server can connect to it. It keeps one connection open to every
server, for the next time that the worker there connects to the driver's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcmp.config.addresses import format_address, parse
from rpcmp.errors import (
    JobError,
    RelayError,
    RpcmpError,
    SecurityError,
    UnreachableError,
    WorkerDiedError,
    one_line,
)
from rpcmp.net.connection_limits import connections
from rpcmp.net.identity import RELAY, Role
from rpcmp.net.local_peer import require_answers, require_same_user
from rpcmp.net.peer_connection import OPEN_SECONDS, ConnectionTasks, Dialer, PeerConnection
from rpcmp.net.port import IncomingConnection
from rpcmp.net.rpc_inspection import Inspection, Pipes
from rpcmp.net.tunnel import splice
from rpcmp.process import sockets
from rpcmp.process.channel import Message
from rpcmp.process.fork_client import Forks

RETRY_SECONDS = 0.5

ASK_SECONDS = 5.0
"""Time limit for the kernel to tell the owner of a connection."""

MAX_PARKED = 8
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
        return f"{self.name} at {self.server}" if self.server else self.name

    def accepts_role(self, role: Role | None) -> bool:
        """Return whether a certificate's role may be this member; None: without certificates."""
        if role is None:
            return True
        return role.may_serve(self.stage_index) if self.server else role.is_driver


class Relay:
    """Carries the connections of one member of one generation.

    Args:
        job_id, generation: connections of others are refused.
        name: RPC name of the member.
        forks: opens sockets in the member's network.
        dialer: opens connections to servers.
        on_refused: called, before the connection ends, when a peer has sent a message that the
            protocol does not allow: the job must end.
        on_unreachable: called when a connection of the member cannot be carried, for which its
            torch RPC may wait forever: the group must end.
    """

    def __init__(
        self,
        job_id: str,
        generation: int,
        name: str,
        forks: Forks,
        dialer: Dialer,
        on_refused: Callable[[SecurityError], None],
        on_unreachable: Callable[[UnreachableError], None],
    ) -> None:
        self._greeting = {"job_id": job_id, "generation": generation}
        self._name = name
        self._forks, self._dialer = forks, dialer
        self._pipes = Pipes(on_refused)
        self._on_unreachable = on_unreachable
        self._own = ""
        self._peers: dict[str, RelayPeer] = {}
        self._parked: asyncio.Queue[PeerConnection] = asyncio.Queue(MAX_PARKED)
        self._is_shared = False
        self._is_closed = False
        self._has_warned = False
        self._listeners: dict[str, socket.socket] = {}
        self._agents: dict[str, str] = {}  # their addresses, by those that we listen at for them
        self._tasks = ConnectionTasks()
        self._carried: dict[PeerConnection, str] = {}
        self._open: Counter[str] = Counter()

    @property
    def round_trips(self) -> dict[str, float]:
        """Seconds of a round trip to each connected peer's host, by the address of its agent."""
        seconds: dict[str, float] = {}
        for end, peer in self._carried.items():
            if (info := sockets.info(end.socket.fileno())) is not None:
                seconds[peer] = min(info.round_trip_s, seconds.get(peer, info.round_trip_s))
        return seconds

    def with_agents(self, beat: Message) -> Message:
        """Return a member's heartbeat with its peers' addresses in place of our listeners'."""
        if "ways" not in beat:
            return beat
        ways = [(self._agents.get(peer, peer), *counts) for peer, *counts in beat["ways"]]
        return {**beat, "ways": ways}

    async def reserve(self, names: Iterable[str]) -> dict[str, str]:
        """Listen for connections to the members `names`, which wait until `open` is called.

        Returns:
            The address at which the member is to dial each of them.

        Raises:
            WorkerDiedError: there is no port; fresh processes may get one.
        """
        self._require_open()
        for name in set(names) - self._listeners.keys():
            try:
                listener = await self._forks.listener()
            except JobError as error:
                raise WorkerDiedError(
                    f"cannot listen for connections to {name}: {error}"
                ) from error
            if self._is_closed:
                listener.close()
            self._require_open()
            listener.setblocking(False)
            self._listeners[name] = listener
        return {name: _address(listener) for name, listener in self._listeners.items()}

    async def open(self, own: str, peers: Sequence[RelayPeer]) -> None:
        """Start to carry connections to `peers`, for which `reserve` has been called.

        `own` is HOST:PORT of the member's agent.
        """
        self._require_open()
        self._is_shared = not (await self._forks.network()).is_private
        self._own = own
        self._peers = {peer.name: peer for peer in peers}
        for peer in peers:
            if (listener := self._listeners.get(peer.name)) is None:
                raise RelayError(f"{peer.name} was not said to be in another network")
            if self._is_shared:
                require_answers(listener)
            self._agents[_address(listener)] = peer.listens
            self._require_open()
            self._tasks.spawn(self._listen(listener, peer))

    def park_at(self, stage: RelayPeer) -> None:
        """As the driver: keep a connection open for the worker of a stage to use."""
        self._tasks.spawn(self._keep_parked(stage))

    async def handle(self, incoming: IncomingConnection, greeting: Mapping[str, Any]) -> None:
        """Serve an incoming connection, with `greeting` for its first frame, until it ends."""
        if {key: greeting.get(key) for key in self._greeting} != self._greeting or not self._own:
            raise RelayError("it is of a group that does not run here")
        self._require_open()
        incoming.end.has_frames = True
        serving = self._tasks.spawn(self._serve(incoming, greeting))
        try:
            await asyncio.wait([serving])
        finally:
            serving.cancel()
        if not serving.cancelled() and (error := serving.exception()) is not None:
            raise error

    async def _serve(self, incoming: IncomingConnection, greeting: Mapping[str, Any]) -> None:
        peer = self._member(incoming, greeting)
        if (op := greeting.get("op")) not in ("connect", "wait"):
            raise RelayError(f"{peer.label} asks for {op!r}, which nobody knows")
        if op == "connect":
            if self._open[peer.name] >= MAX_OPEN:  # each may have a message in our memory
                raise RelayError(f"{peer.label} has {MAX_OPEN} connections here already")
            self._open[peer.name] += 1
            try:
                await self._connect_to_worker(incoming.end, peer, is_awaited=True)
            finally:
                self._open[peer.name] -= 1
        elif peer.server:
            raise RelayError(f"{peer.name} has nothing to wait for")
        else:
            await self._park(incoming.end)

    def _member(self, incoming: IncomingConnection, greeting: Mapping[str, Any]) -> RelayPeer:
        peer = self._peers.get(str(greeting.get("from")))
        if peer is None:
            raise RelayError(f"{incoming.name} names no peer of {self._name}")
        if not peer.accepts_role(incoming.role):
            raise RelayError(f"{incoming.name} may not speak for {peer.name}")
        return peer

    async def close(self) -> None:
        self._is_closed = True
        await self._tasks.cancel()
        for listener in self._listeners.values():
            listener.close()
        while not self._parked.empty():
            self._parked.get_nowait().close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise RelayError("the group has ended")

    async def _listen(self, listener: socket.socket, peer: RelayPeer) -> None:
        """Carry the connections that our worker opens to a peer."""
        dialled = _address(listener)
        async for connection in connections(listener):
            # One after the other: those that arrive meanwhile wait in the kernel, at no cost here.
            if not self._is_shared or await self._is_ours(connection, peer):
                self._tasks.spawn(self._pass_on(PeerConnection(connection), peer, dialled))

    async def _is_ours(self, connection: socket.socket, peer: RelayPeer) -> bool:
        """Return whether our own user has opened a connection; close it otherwise."""
        try:
            await self._require_ours(connection)
        except SecurityError as error:
            connection.close()
            if _is_exhausted(error.__cause__):  # it may well be our worker's
                self._fail(f"{self._name} cannot reach {peer.server or 'the driver'}: {error}")
            elif not self._has_warned:  # once, or any user could fill the log
                self._has_warned = True
                where = peer.server or "the driver"
                log.warning("refused a connection on this host to reach %s: %s", where, error)
            return False
        except TimeoutError:
            connection.close()
            self._fail(
                f"{self._name} cannot reach {peer.server or 'the driver'}: no answer about it"
            )
            return False
        except BaseException:
            connection.close()
            raise
        return True

    async def _require_ours(self, connection: socket.socket) -> None:
        """Raise SecurityError unless our own user has opened a connection, or TimeoutError."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await require_same_user(connection)
        except TimeoutError:  # once more: all of this machine may have stood still meanwhile
            async with asyncio.timeout(ASK_SECONDS):
                await require_same_user(connection)

    async def _pass_on(self, here: PeerConnection, peer: RelayPeer, dialled: str) -> None:
        with _aborted_on_error(here):
            try:
                there = await self._connect_to_host(peer)
            except (RpcmpError, OSError, EOFError) as error:
                why = error if str(error) else f"no answer within {2 * OPEN_SECONDS:.0f} s"
                here.abort()
                self._fail(f"{self._name} cannot reach {peer.server or 'the driver'}: {why}")
                return
        self._carried[there] = peer.listens
        try:
            inspected = Inspection(self._pipes, peer.name, peer.label, peer.listens, dialled)
            await _carry(here, there, inspected)
        finally:
            del self._carried[there]

    def _fail(self, text: str) -> None:
        log.warning("%s", text)
        self._on_unreachable(UnreachableError(text))

    async def _connect_to_host(self, peer: RelayPeer) -> PeerConnection:
        while not peer.server:
            there = await self._parked.get()
            # If it is gone, the driver's network has changed, and it has opened another one.
            with contextlib.suppress(OSError), _aborted_on_error(there):
                await there.write_message({"go": True})
                return there
        return await self._reach(peer)

    async def _reach(self, peer: RelayPeer) -> PeerConnection:
        """Connect to a peer's worker, in a second try if all of this machine stood still meanwhile.

        Raises UnreachableError, RelayError, OSError or EOFError.
        """
        try:
            return await self._reach_in_time(peer)
        except ssl.SSLError:  # it does not accept our certificate
            raise
        except (UnreachableError, RelayError, OSError, EOFError):
            return await self._reach_in_time(peer)

    async def _reach_in_time(self, peer: RelayPeer) -> PeerConnection:
        """Connect to a peer's worker, again if the connection breaks before it gets there.

        A server that strangers overwhelm ends connections before it knows whose they are.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + OPEN_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(ends):
                    return await self._dial(peer, "connect")
            except ssl.SSLError:  # it does not accept our certificate
                raise
            except (UnreachableError, RelayError, OSError, EOFError):
                if clock() + RETRY_SECONDS >= ends:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _dial(self, peer: RelayPeer, op: str) -> PeerConnection:
        """Connect to a peer's server, and wait until the connection leads to its worker or ours."""
        there = await self._dialer.open(peer.server, RELAY, peer.stage_index)
        with _aborted_on_error(there):
            await there.write_message({**self._greeting, "op": op, "from": self._name})
            await there.read_message()
        there.has_frames = True
        return there

    async def _park(self, end: PeerConnection) -> None:
        """Keep a driver's connection until our worker connects to the driver."""
        if self._parked.full():  # of a driver whose network comes and goes
            self._parked.get_nowait().abort()
        self._parked.put_nowait(end)
        # The task that uses the connection owns it, so this one must not close it meanwhile.
        await end.gone.wait()

    async def _keep_parked(self, stage: RelayPeer) -> None:
        while True:
            try:
                there = await self._dial(stage, "wait")
            except (RpcmpError, OSError, EOFError) as error:
                # A lost host is reported by its supervisor, a refusal only here.
                if isinstance(error, SecurityError):
                    log.warning("the worker of %s cannot reach the driver: %s", stage.server, error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._tasks.spawn(self._serve_parked(there, stage))

    async def _serve_parked(self, there: PeerConnection, peer: RelayPeer) -> None:
        with contextlib.suppress(OSError, RpcmpError):
            await self._connect_to_worker(there, peer)

    async def _connect_to_worker(
        self, there: PeerConnection, peer: RelayPeer, is_awaited: bool = False
    ) -> None:
        """Carry a connection from another host to our own worker; tell the host if it waits."""
        is_counted_on = not is_awaited
        try:
            with _aborted_on_error(there):
                here = PeerConnection(await self._forks.connectable())
                with _aborted_on_error(here):
                    # First, as the host may have given up: an agent that listens does not survive a
                    # connection that ends before its first byte.
                    if is_awaited:
                        await there.write_message({"go": True})
                        is_counted_on = True
                    await asyncio.get_running_loop().sock_connect(here.socket, parse(self._own))
        except (ConnectionError, WorkerDiedError):  # a process is gone, which is noticed anyway
            raise
        except (OSError, RpcmpError) as error:  # such as too many open files
            if is_counted_on:
                self._fail(f"{peer.label} cannot reach {self._name} from here: {one_line(error)}")
            raise
        await _carry(here, there, Inspection(self._pipes, peer.name, peer.label))


def _address(listener: socket.socket) -> str:
    return format_address(*listener.getsockname())


def _is_exhausted(error: BaseException | None) -> bool:
    """Whether this machine has too little left, such as descriptors, to ask it anything."""
    codes = errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM
    return isinstance(error, OSError) and error.errno in codes


@contextlib.contextmanager
def _aborted_on_error(end: PeerConnection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        end.abort()
        raise


async def _carry(here: PeerConnection, there: PeerConnection, inspection: Inspection) -> None:
    """Carry until one end is gone; the agents notice that by themselves."""
    try:
        with contextlib.suppress(OSError, RelayError, SecurityError):  # the last is reported
            await splice(here, there, inspection)
    finally:
        inspection.close()
