"""Connections between processes: `PeerConnection`, and the `Dialer` that opens them to servers.

Two protocols pass over a connection. gRPC's goes as it is. The relay's is cut into frames, a length
of four bytes and that many bytes of payload. An empty frame ends the stream: TLS has no sound way
to close one direction only, and a connection that breaks must not look like one that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import struct
from collections.abc import Awaitable
from typing import Any

from rpcmp.config.addresses import parse
from rpcmp.errors import RelayError, SecurityError, UnreachableError
from rpcmp.net.identity import GRPC, TlsState, refusal
from rpcmp.net.local_peer import require_own_server, source
from rpcmp.net.security import Security
from rpcmp.process.sockets import LOOPBACK, keep_alive

CHUNK = 256 * 1024
"""Bytes per read; more would not stay in a core's cache."""

HEADER = struct.Struct("!I")

MAX_GREETING = 16 * 1024
"""Bytes of a frame before the stream starts."""


class PeerConnection:
    """A connected socket with or without TLS; owned, and made non-blocking.

    Attributes:
        session: its TLS; None: plain.
        has_frames: whether it speaks the relay's protocol.
        decrypted: data that has been received and not been read yet.
        gone: set when it is closed.
    """

    def __init__(self, connection: socket.socket, session: TlsState | None = None) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.session = session
        self.has_frames = False
        self.decrypted = bytearray()
        self.gone = asyncio.Event()

    async def do_handshake(self) -> None:
        """Complete the TLS handshake, if there is TLS."""
        loop = asyncio.get_running_loop()
        while self.session is not None:
            try:
                is_done = self.session.handshake()
            finally:  # this also sends the alert that says why the other side is refused
                if data := self.session.to_send():
                    with contextlib.suppress(BrokenPipeError):  # it has refused us: read why
                        await loop.sock_sendall(self.socket, data)
            if is_done:
                return
            self.session.feed(await self._receive())

    async def read(self, count: int) -> bytes:
        """Read exactly `count` bytes.

        Raises:
            EOFError: the connection ended before.
            OSError: it broke. ssl.SSLError, a subclass: our certificate was refused.
        """
        self._decrypt()  # what came together with the handshake
        while len(self.decrypted) < count:
            await self._receive_more()
        return self._pop(count)

    async def read_some(self, limit: int) -> bytes:
        """Read at least one byte and at most `limit`; raises as `read`."""
        self._decrypt()
        while not self.decrypted:
            await self._receive_more()
        return self._pop(limit)

    async def write(self, data: bytes) -> None:
        if self.session is not None:
            self.session.encrypt(data)
            data = self.session.to_send()
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read_message(self) -> dict[str, Any]:
        """Read a frame of JSON; only before the stream starts."""
        (size,) = HEADER.unpack(await self.read(HEADER.size))
        if size > MAX_GREETING:
            raise RelayError(f"the first frame has {size} bytes")
        try:
            message = json.loads(await self.read(size))
        except (ValueError, RecursionError) as error:  # or has no end of brackets
            raise RelayError("the first frame is not JSON") from error
        if not isinstance(message, dict):
            raise RelayError("the first frame is no JSON object")
        return message

    async def write_message(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        await self.write(HEADER.pack(len(data)) + data)

    def close(self) -> None:
        """Close it at once; announces the end if that does not block."""
        if self.session is not None:
            self.session.close()
            with contextlib.suppress(OSError):
                self.socket.send(self.session.to_send())
        self.socket.close()
        self.gone.set()

    def abort(self) -> None:
        """Close it so that the peer sees a broken connection instead of an end."""
        with contextlib.suppress(OSError):
            linger = struct.pack("ii", 1, 0)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()
        self.gone.set()

    def shut_down(self) -> None:
        """Shut down both directions; the user of the connection notices, and closes it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _pop(self, limit: int) -> bytes:
        result = bytes(self.decrypted[:limit])
        del self.decrypted[:limit]
        return result

    async def _receive_more(self) -> None:
        data = await self._receive()
        if self.session is None:
            self.decrypted += data
        else:
            self.session.feed(data)
            self._decrypt()

    def _decrypt(self) -> None:
        if self.session is not None:
            part = memoryview(bytearray(MAX_GREETING))
            while got := self.session.decrypt(part):
                self.decrypted += part[:got]

    async def _receive(self) -> bytes:
        data = await asyncio.get_running_loop().sock_recv(self.socket, CHUNK)
        if not data:
            raise EOFError("the other side has closed the connection")
        return data


class ConnectionTasks(set[asyncio.Future[None]]):
    """Tasks that serve connections, until they have ended."""

    def spawn(self, work: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task

    async def cancel(self) -> None:
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)


OPEN_SECONDS = 6.0
"""Time limit for a host to answer, handshake included."""

HINT_SECONDS = 2.0
"""Time limit for finding out why it did not."""


class Dialer:
    """Opens connections to stage servers, authenticated by our certificate.

    Args:
        security: this process's certificate, or none.
        server_name: name in the servers' certificates; None: the host that is dialled.
    """

    def __init__(self, security: Security, server_name: str | None = None) -> None:
        self.security = security
        self._server_name = server_name

    async def open(self, address: str, protocol: str, stage_index: int | None) -> PeerConnection:
        """Open a connection to the server at `address`, for GRPC or RELAY.

        Its certificate has to be for stage `stage_index`; None: for any.
        """
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                return await self._open(address, protocol, stage_index)
        except TimeoutError as error:
            raise UnreachableError(
                f"{address} does not answer within {OPEN_SECONDS:.0f} s"
            ) from error
        except ssl.SSLError as error:
            raise SecurityError(f"{address} is not trusted: {self.refusal(error)}") from error
        except EOFError as error:
            raise UnreachableError(f"{address} hung up during the handshake") from error
        except OSError as error:
            raise UnreachableError(f"{address} cannot be reached: {_reason(error)}") from error

    def refusal(self, error: ssl.SSLError) -> str:
        """Describe why a handshake with a server failed, and what to do."""
        return refusal(error, self.security.certs)

    async def tls_required_error(self, address: str) -> SecurityError | None:
        """Return an error if the server wants TLS and was contacted without; None otherwise."""
        if self.security.credentials is not None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no data is sent to it
        context.set_alpn_protocols([GRPC])
        host, port = parse(address)
        try:
            session = TlsState(context, host)
            async with asyncio.timeout(HINT_SECONDS):
                with await _connect(host, port) as connection:
                    await self._require_own(connection, address)
                    await PeerConnection(connection, session).do_handshake()
        except (OSError, TimeoutError, EOFError, SecurityError, ValueError):
            return None
        return SecurityError(
            f"{address} requires TLS: give --certs, a folder with a certificate of its authority"
        )

    async def _open(self, address: str, protocol: str, stage_index: int | None) -> PeerConnection:
        host, port = parse(address)
        session = self._session(protocol, host)
        end = PeerConnection(await _connect(host, port), session)
        try:
            await self._require_own(end.socket, address)
            await end.do_handshake()
            if session is not None:
                role = session.peer_role
                if role is None or not role.may_serve(stage_index):
                    wanted = "a stage" if stage_index is None else f"stage {stage_index}"
                    raise SecurityError(
                        f"{address} has a certificate for {role or 'no role of rpcmp'}, not for "
                        f"{wanted}"
                    )
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
        if self.security.credentials is None:
            return None
        name = host if self._server_name is None else self._server_name
        try:
            return TlsState(self.security.credentials.client(protocol), name)
        except ValueError as error:
            raise SecurityError(f"no certificate can be for a host called {name!r}") from error


def _reason(error: OSError) -> str:
    """Return the system's message; asyncio's repeats the address."""
    if error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


async def _connect(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for index, (family, kind, number, _, address) in enumerate(infos):
        connection = socket.socket(family, kind, number)
        connection.setblocking(False)
        keep_alive(connection.fileno())
        if str(address[0]).startswith(LOOPBACK):
            with contextlib.suppress(OSError):  # that is only to be found faster
                connection.bind((source(os.getpid()), 0))
        try:
            async with asyncio.timeout(OPEN_SECONDS / len(infos)):  # one of them may be a dead end
                await loop.sock_connect(connection, address)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError) or index + 1 == len(infos):
                raise
        else:
            return connection
    raise OSError(f"{host} has no address")
