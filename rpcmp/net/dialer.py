"""Connections to stage servers, and the tunnel for gRPC's.

gRPC cannot insist on TLS 1.3, check a role in a certificate, or ask for the owner of a local
server. So its channel ends at a Unix socket in this process, in a folder that only this user can
open, and the tunnel carries its bytes over a connection of the Dialer. That connection has our
certificate, so only this very process may use the socket: not another one of its user, such as a
worker that runs a job's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import struct

from rpcmp.config.addresses import parse
from rpcmp.errors import RpcmpError, SecurityError, UnreachableError
from rpcmp.net.accept import connections
from rpcmp.net.identity import GRPC
from rpcmp.net.local_peer import require_own_server
from rpcmp.net.security import Security
from rpcmp.net.splice import splice
from rpcmp.net.tls import Connection, TlsState, refusal
from rpcmp.process import resources
from rpcmp.process.sockets import keep_alive

OPEN_SECONDS = 6.0
"""Time limit for a host to answer, handshake included."""

HINT_SECONDS = 2.0
"""Time limit for finding out why it did not."""


class Dialer:
    """Opens connections to stage servers, authenticated by our certificate.

    Args:
        security: this process's certificate, or none.
        server_name: name in the servers' certificates; None: the host that is dialled.

    Attributes:
        security: as given.
    """

    def __init__(self, security: Security, server_name: str | None = None) -> None:
        self.security = security
        self._server_name = server_name

    async def open(self, address: str, protocol: str, stage_index: int | None) -> Connection:
        """Open a connection to the server at `address`.

        Args:
            protocol: GRPC or RELAY.
            stage_index: the stage that the server's certificate has to be for; None: any.

        Raises:
            UnreachableError: no answer.
            SecurityError: it is not the expected server.
        """
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self._open(address, protocol, stage_index)
        except TimeoutError as error:
            raise UnreachableError(
                f"{address} does not answer within {OPEN_SECONDS:.0f} s"
            ) from error
        except ssl.SSLError as error:
            raise SecurityError(f"{address} is not trusted: {refusal(error)}") from error
        except EOFError as error:
            raise UnreachableError(f"{address} hung up during the handshake") from error
        except OSError as error:
            raise UnreachableError(f"{address} cannot be reached: {_reason(error)}") from error

    async def misunderstanding(self, address: str) -> SecurityError | None:
        """Return an error if the server wants TLS and was contacted without; None otherwise."""
        if self.security.credentials is not None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is said to it
        context.set_alpn_protocols([GRPC])
        host, port = parse(address)
        try:
            async with asyncio.timeout(HINT_SECONDS):
                connection = await _connect(host, port)
                with connection:
                    await self._require_own(connection, address)
                    _, writer = await asyncio.open_connection(
                        sock=connection, ssl=context, server_hostname=""
                    )
                    writer.transport.abort()  # not close: that waits for the other end's goodbye
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError, EOFError, SecurityError):
            return None
        return SecurityError(
            f"{address} requires TLS: give --certs, a folder with a certificate of its authority"
        )

    async def _open(self, address: str, protocol: str, stage_index: int | None) -> Connection:
        host, port = parse(address)
        session = self._session(protocol, host)
        end = Connection(await _connect(host, port), session)
        try:
            await self._require_own(end.socket, address)
            await end.do_handshake()
            if session is not None:
                self._require(session, address, stage_index)
                self.security.establish(end)
        except BaseException:
            end.close()
            raise
        return end

    async def _require_own(self, connection: socket.socket, address: str) -> None:
        """Refuse another user's server: without certificates it must not get a byte."""
        if self.security.credentials is None and not self.security.insecure:
            await require_own_server(connection, address)

    def _session(self, protocol: str, host: str) -> TlsState | None:
        credentials = self.security.credentials
        if credentials is None:
            return None
        name = host if self._server_name is None else self._server_name
        try:
            return TlsState(credentials.client(protocol), name)
        except ValueError as error:
            raise SecurityError(f"no certificate can be for a host called {name!r}") from error

    @staticmethod
    def _require(session: TlsState, address: str, stage_index: int | None) -> None:
        found = session.peer_role
        if found is None or not found.may_serve(stage_index):
            wanted = "a stage" if stage_index is None else f"stage {stage_index}"
            raise SecurityError(
                f"{address} has a certificate for {found or 'no role of rpcmp'}, not for {wanted}"
            )


def _reason(error: OSError) -> str:
    """Return the system's message; asyncio's repeats the address."""
    if error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


async def _connect(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for index, (family, kind, number, _, address) in enumerate(found):
        connection = socket.socket(family, kind, number)
        connection.setblocking(False)
        keep_alive(connection.fileno())
        try:
            async with asyncio.timeout(OPEN_SECONDS / len(found)):  # one of them may be a dead end
                await loop.sock_connect(connection, address)
        except OSError:
            connection.close()
            if index + 1 == len(found):
                raise
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise OSError(f"{host} has no address")


PREFIX = "rpcmp-tunnel-"

_CREDENTIALS = struct.Struct("iII")
"""See `struct ucred` in unix(7): process, user, group."""

log = logging.getLogger(__name__)


class Tunnel:
    """A Unix socket that leads to one stage server. Create it in an event loop, and `close` it.

    Args:
        dialer: opens the connections.
        address: HOST:PORT of the server.
        stage_index: the stage that the server's certificate has to be for; None: any.

    Attributes:
        refused: done with the error once the server is not the expected one, or has refused us.
        absent: done with the error once the host has refused a connection; a server that is
            starting may still come.
        failure: the error of the last attempt to connect; None if it succeeded.
    """

    def __init__(self, dialer: Dialer, address: str, stage_index: int | None) -> None:
        self._dialer, self._address, self._stage_index = dialer, address, stage_index
        self._folder = resources.create_folder(PREFIX)
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
        """The target for a gRPC channel."""
        return f"unix:{self._path}"

    async def close(self) -> None:
        """Close all connections."""
        tasks = [self._accepting, *self._carrying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        resources.remove_folder(self._folder)
        self.refused.cancel()
        self.absent.cancel()

    async def _accept(self) -> None:
        async for connection in connections(self._listener):
            if (pid := _pid_of_peer(connection)) != os.getpid():
                log.warning("process %d has tried to reach %s by our socket", pid, self._address)
                connection.close()
                continue
            task = asyncio.create_task(self._carry(Connection(connection)))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)

    async def _carry(self, here: Connection) -> None:
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
            ) as error:  # with TLS 1.3 the first read tells whether we are accepted
                if there.session is not None and not there.session.has_received:
                    self._refuse(SecurityError(f"{self._address} refuses us: {refusal(error)}"))
            except OSError:  # it is gone, and gRPC will see that
                pass

    def _refuse(self, error: SecurityError) -> None:
        self.failure = error
        if not self.refused.done():
            self.refused.set_result(error)


def _pid_of_peer(connection: socket.socket) -> int:
    """Return the process that has connected; 0 if it is outside of our pid namespace.

    The kernel notes the process and not the thread, by its id in our namespace.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int
    pid, _, _ = _CREDENTIALS.unpack(found)
    return pid
