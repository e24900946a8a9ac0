"""Just enough HTTP/2 and gRPC to build valid and invalid messages byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, SETTINGS, PING, CONTINUATION = 0x0, 0x1, 0x4, 0x6, 0x9

END_STREAM, END_HEADERS = 0x1, 0x4

_POST, _HTTP = b"\x83", b"\x86"
"""Entries of HPACK's static table."""


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """Encode one frame.

    Args:
        length: the length in its header; None: the true length.
    """
    size = len(payload) if length is None else length
    return struct.pack("!I", size)[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Encode one header as an HPACK literal without a table entry."""
    return b"\x00" + _text(name) + _text(value)


def opening() -> bytes:
    """Return the first bytes that every client sends."""
    return PREFACE + frame(SETTINGS, 0, 0, b"")


def request(method: str, stream: int, more: Sequence[bytes] = ()) -> bytes:
    """Encode the headers of a call."""
    block = [
        *(_POST, _HTTP, header(b":path", method.encode()), header(b":authority", b"localhost")),
        *(header(b"content-type", b"application/grpc"), header(b"te", b"trailers"), *more),
    ]
    return frame(HEADERS, END_HEADERS, stream, b"".join(block))


def message(data: bytes, length: int | None = None) -> bytes:
    """Encode one message of gRPC with `length` in its header."""
    return struct.pack("!BI", 0, len(data) if length is None else length) + data


def call(method: str, data: bytes, stream: int = 1) -> bytes:
    """Encode a valid call."""
    body = message(data)
    parts = [body[at : at + 16384] for at in range(0, len(body), 16384)]
    flags = [0] * (len(parts) - 1) + [END_STREAM]
    frames = (frame(DATA, flag, stream, part) for flag, part in zip(flags, parts, strict=True))
    return request(method, stream) + b"".join(frames)


def _text(value: bytes) -> bytes:
    assert len(value) < 127
    return bytes([len(value)]) + value
