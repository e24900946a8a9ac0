"""The TLS of one connection, apart from its socket.

On memory BIOs, so that one thread carries any number of connections without ever blocking, and
encrypts as much at once as it has read: the fewest calls a byte that Python's ssl allows.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import Any

from rpcmp.wire import role
from rpcmp.wire.role import Role


class Session:
    """One side of a TLS connection.

    Args:
        context: of the own certificate.
        server_hostname: whom the client wants to reach; None: this is the server.

    Attributes:
        has_received: whether the other side has sent anything, and so accepted us.
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
        """The application protocol that both sides have agreed on (ALPN)."""
        return self._tls.selected_alpn_protocol()

    @property
    def peer_role(self) -> Role | None:
        """What the other side's certificate allows it to be; None: nothing of ours."""
        certificate: dict[str, Any] = dict(self._tls.getpeercert() or {})
        names = certificate.get("subjectAltName", ())
        return role.find(value for kind, value in names if kind == "URI")

    @property
    def peer_certificate(self) -> bytes | None:
        """The other side's certificate, DER; None: it has shown none."""
        return self._tls.getpeercert(binary_form=True)

    def handshake(self) -> bool:
        """Go on with the handshake; whether it is complete.

        Raises:
            ssl.SSLError: the other side is not who it should be.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def feed(self, data: bytes | memoryview) -> None:
        """Take what has come over the socket."""
        self._received.write(data)

    def decrypt(self, into: memoryview) -> int:
        """Decrypt what has come so far; how many bytes, 0 where there is nothing more by now.

        Raises:
            EOFError: the other side has closed the connection.
            ssl.SSLError: somebody has meddled with it.
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
        """Encrypt `data`; `to_send` has it."""
        self._tls.write(data)

    def close(self) -> None:
        """Say that nothing more will come; `to_send` has it."""
        with contextlib.suppress(ssl.SSLError, ValueError):  # it has not, or not shaken hands
            self._tls.unwrap()

    def to_send(self) -> bytes:
        """What has to go over the socket."""
        return self._to_send.read()
