"""Relays that do as little as possible, one way and blocking: what ours could reach at best.

Each carries bytes from one socket to another until the end, and is one of two: the near one
encrypts, the far one decrypts. `tests.benchmarks.relay` measures them next to ours.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from rpcmp.net.peer_connection import CHUNK, HEADER

TAG = 16
"""Bytes of a tag of AES-GCM."""


def handshake(
    context: ssl.SSLContext, connection: socket.socket, name: str | None
) -> ssl.SSLSocket:
    """Return a blocking TLS connection; `name` is the server's, or None at the server."""
    return context.wrap_socket(connection, server_side=name is None, server_hostname=name)


def plain(source: socket.socket, sink: socket.socket) -> None:
    """Carry without TLS; or with it, if one of them is an SSLSocket: its records one by one."""
    buffer = memoryview(bytearray(CHUNK))
    while count := source.recv_into(buffer):
        sink.sendall(buffer[:count])


def gathered(source: socket.socket, sink: socket.socket) -> None:
    """Carry from an SSLSocket, with as many records per call of `sendall` as have CHUNK bytes."""
    buffer = memoryview(bytearray(CHUNK))
    count = 1
    while count:
        have = 0
        while have < CHUNK and (count := source.recv_into(buffer[have:])):
            have += count
        sink.sendall(buffer[:have])


class Memory:
    """TLS on memory BIOs, as in `rpcmp.net.identity.TlsState`."""

    def __init__(self, context: ssl.SSLContext, link: socket.socket, name: str | None) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._received, self._to_send, server_side=name is None, server_hostname=name
        )
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                link.sendall(self._to_send.read())
                self._received.write(link.recv(CHUNK))
            else:
                link.sendall(self._to_send.read())
                return

    def encrypt(self, source: socket.socket, link: socket.socket) -> None:
        buffer = memoryview(bytearray(CHUNK))
        while count := source.recv_into(buffer):
            self._tls.write(buffer[:count])
            link.sendall(self._to_send.read())

    def decrypt(self, link: socket.socket, sink: socket.socket) -> None:
        buffer, clear = (memoryview(bytearray(CHUNK)) for _ in range(2))
        while count := link.recv_into(buffer):
            self._received.write(buffer[:count])
            have = 0
            try:
                while have < CHUNK and (self._received.pending or self._tls.pending()):
                    got: int = self._tls.read(CHUNK - have, clear[have:])  # type: ignore[assignment]
                    have += got
            except ssl.SSLWantReadError:
                pass
            sink.sendall(clear[:have])


class Frames:
    """AES-256-GCM by `cryptography`, in frames of up to CHUNK: no TLS, so a floor and no proposal.

    A record of TLS has at most 16 KiB. This shows what such small records cost.
    """

    def __init__(self) -> None:
        self._key = AESGCM(bytes(32))
        self._number = 0

    @property
    def _nonce(self) -> bytes:
        self._number += 1
        return self._number.to_bytes(12, "big")

    def encrypt(self, source: socket.socket, link: socket.socket) -> None:
        buffer, frame = memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK + 2 * TAG))
        while count := source.recv_into(buffer):
            end = HEADER.size + count + TAG
            HEADER.pack_into(frame, 0, count)
            head, body = frame[: HEADER.size], frame[HEADER.size : end]
            self._key.encrypt_into(self._nonce, buffer[:count], head, body)
            link.sendall(frame[:end])

    def decrypt(self, link: socket.socket, sink: socket.socket) -> None:
        buffer, clear = memoryview(bytearray(3 * CHUNK)), memoryview(bytearray(CHUNK))
        have = 0
        while got := link.recv_into(buffer[have:]):
            have, at = have + got, 0
            while have - at >= HEADER.size:
                (count,) = HEADER.unpack_from(buffer, at)
                begin = at + HEADER.size
                end = begin + count + TAG
                if end > have:
                    break
                head, body = buffer[at:begin], buffer[begin:end]
                self._key.decrypt_into(self._nonce, body, head, clear[:count])
                sink.sendall(clear[:count])
                at = end
            buffer[: have - at] = buffer[at:have]
            have -= at


Carry = Callable[[socket.socket, socket.socket], None]
