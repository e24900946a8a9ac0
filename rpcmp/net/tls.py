"""Connections, with TLS or without, and the frames of the relay's protocol.

TLS works on memory BIOs: one thread carries any number of connections without blocking, and
encrypts as much at once as it has read, with the fewest calls per byte that Python's ssl allows.

Two protocols pass over a connection. gRPC's goes as it is. The relay's is cut into frames, a length
of four bytes and that many bytes of payload. An empty frame ends the stream: TLS has no sound way
to close one direction only, and a connection that breaks must not look like one that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from typing import Any

from rpcmp.errors import RelayError
from rpcmp.net import identity
from rpcmp.net.identity import Role


class TlsState:
    """The TLS state of one connection, apart from its socket.

    Args:
        context: of our certificate.
        server_hostname: the server's name, for a client; None: this is the server.

    Attributes:
        has_received: whether the peer has sent data, and so has accepted us.
    """

    def __init__(self, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        self.has_received = False
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._received,
            self._to_send,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
        )

    @property
    def protocol(self) -> str | None:
        """The application protocol that was negotiated (ALPN)."""
        return self._tls.selected_alpn_protocol()

    @property
    def peer_role(self) -> Role | None:
        """The role in the peer's certificate; None if it has none."""
        certificate: dict[str, Any] = dict(self._tls.getpeercert() or {})
        names = certificate.get("subjectAltName", ())
        return identity.find(value for kind, value in names if kind == "URI")

    @property
    def peer_certificate(self) -> bytes | None:
        """The peer's certificate, DER; None if it has sent none."""
        return self._tls.getpeercert(binary_form=True)

    def handshake(self) -> bool:
        """Continue the handshake; return whether it is complete.

        Raises:
            ssl.SSLError: the peer's certificate was refused.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def feed(self, data: bytes | memoryview) -> None:
        """Take data that was received from the socket."""
        self._received.write(data)

    def decrypt(self, into: memoryview) -> int:
        """Decrypt data that was received; return the number of bytes, 0 if there are no more now.

        Raises:
            EOFError: the peer has closed the connection.
            ssl.SSLError: the data was tampered with.
        """
        count = 0
        try:
            while count < len(into) and (self._received.pending or self._tls.pending()):
                got: int = self._tls.read(len(into) - count, into[count:])  # type: ignore[assignment]
                if not got:
                    break
                count += got
                self.has_received = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError as error:
            if not count:
                raise EOFError("the other side has closed the connection") from error
        return count

    def encrypt(self, data: bytes | memoryview) -> None:
        """Encrypt `data`; get it from `to_send`."""
        self._tls.write(data)

    def close(self) -> None:
        """Announce the end of our data; get that from `to_send`."""
        with contextlib.suppress(ssl.SSLError, ValueError):  # it has not, or not shaken hands
            self._tls.unwrap()

    def to_send(self) -> bytes:
        """Return the bytes to send over the socket."""
        return self._to_send.read()


CHUNK = 256 * 1024
"""Bytes per read; more would not stay in a core's cache."""

HEADER = struct.Struct("!I")

MAX_GREETING = 16 * 1024
"""Bytes of a frame before the stream starts."""


class PeerConnection:
    """A connected socket; owned, and made non-blocking.

    Args:
        connection: the socket.
        session: its TLS; None: plain.

    Attributes:
        socket: the socket.
        session: its TLS.
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
        """Complete the TLS handshake, if there is TLS.

        Raises:
            ssl.SSLError: one side has refused the other's certificate.
            OSError, EOFError: the connection is gone.
        """
        loop = asyncio.get_running_loop()
        while self.session is not None:
            try:
                is_done = self.session.handshake()
            finally:  # also what tells the other side why it is refused
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
            await self._more()
        return self._taken(count)

    async def read_some(self, limit: int) -> bytes:
        """Read at least one byte and at most `limit`.

        Raises:
            EOFError, OSError: as `read`.
        """
        self._decrypt()
        while not self.decrypted:
            await self._more()
        return self._taken(limit)

    async def write(self, data: bytes) -> None:
        if self.session is not None:
            self.session.encrypt(data)
            data = self.session.to_send()
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read_message(self) -> dict[str, Any]:
        """Read a frame of JSON; only before the stream starts.

        Raises:
            RelayError: the frame is not a JSON object, or too long.
            EOFError, OSError: as `read`.
        """
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
        """Send a frame of JSON."""
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

    def _taken(self, limit: int) -> bytes:
        result = bytes(self.decrypted[:limit])
        del self.decrypted[:limit]
        return result

    async def _more(self) -> None:
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


def refusal(error: BaseException) -> str:
    """Describe why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError) and error.reason:
        return ALERTS.get(error.reason, error.reason.lower().replace("_", " "))
    return str(error) or type(error).__name__


ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the other side wants a certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "the other side does not know the CA of our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other side says that our certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "the other side says that our certificate is revoked",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other side does not accept our certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other side does not speak TLS 1.3",
    "UNSUPPORTED_PROTOCOL": "the other side does not speak TLS 1.3",
    "WRONG_VERSION_NUMBER": "the other side does not speak TLS at all",
    "HTTP_REQUEST": "the other side does not speak TLS at all",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it has no certificate",
    "NO_SHARED_CIPHER": "no cipher in common",
    "TLSV1_ALERT_NO_APPLICATION_PROTOCOL": "the other side is no rpcmp server",
}
