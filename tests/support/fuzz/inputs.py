"""Malformed inputs: random, truncated, flipped, oversized and slow. They depend only on a seed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from tests.support.fuzz import http2


class Pace(Enum):
    """Speed at which an input is sent."""

    AT_ONCE = "at once"
    DRIP = "one byte at a time"
    NEVER = "never"


@dataclass(frozen=True)
class Input:
    """Bytes to send over one connection.

    Attributes:
        data: its bytes.
        pace: speed of sending.
        hangs_up: whether the sender closes its half afterwards.
    """

    data: bytes
    pace: Pace = Pace.AT_ONCE
    hangs_up: bool = False


def inputs(draw: random.Random, valid: Iterator[bytes]) -> Iterator[Input]:
    """Yield malformed inputs without end.

    Args:
        valid: messages from which they are created.
    """
    makers = list(_MAKERS)
    weights = [_MAKERS[maker] for maker in makers]
    while True:
        (maker,) = draw.choices(makers, weights)
        yield Input(maker(draw, valid), _pace(draw), draw.random() < 0.3)


def _pace(draw: random.Random) -> Pace:
    return draw.choices([Pace.AT_ONCE, Pace.DRIP, Pace.NEVER], [94, 4, 2])[0]


def noise(draw: random.Random, valid: Iterator[bytes]) -> bytes:
    """Return random bytes."""
    return draw.randbytes(draw.choice([1, 3, 4, 5, 9, 24, 300, 5000, 70_000]))


def truncated(draw: random.Random, valid: Iterator[bytes]) -> bytes:
    """Return the start of a valid input."""
    whole = next(valid)
    return whole[: draw.randrange(len(whole))]


def flipped(draw: random.Random, valid: Iterator[bytes]) -> bytes:
    """Return a valid input with a few flipped bits."""
    data = bytearray(next(valid))
    for _ in range(draw.choice([1, 1, 2, 8])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def spliced(draw: random.Random, valid: Iterator[bytes]) -> bytes:
    """Return halves of two inputs, or one input twice."""
    one, other = next(valid), next(valid)
    return one[: draw.randrange(len(one))] + other[draw.randrange(len(other)) :] + one


def whole(draw: random.Random, valid: Iterator[bytes]) -> bytes:
    """Return a valid input, whose content is random."""
    return next(valid)


def oversized(draw: random.Random, valid: Iterator[bytes]) -> bytes:
    """Return an input that exceeds a limit, or announces a length that does."""
    return draw.choice(_OVERSIZED)(draw)


def _greeting_of_4_gib(draw: random.Random) -> bytes:
    return struct.pack("!I", draw.choice([2**32 - 1, 16 * 1024 + 1, 2**24])) + draw.randbytes(999)


def _deep_greeting(draw: random.Random) -> bytes:
    text = draw.choice([b"[", b'{"a":']) * 2700
    return struct.pack("!I", len(text)) + text


def _long_number(draw: random.Random) -> bytes:
    text = b'{"generation": ' + b"9" * 16_000 + b"}"
    return struct.pack("!I", len(text)) + text


def _record_that_lies(draw: random.Random) -> bytes:
    return b"\x16\x03\x01\xff\xff" + draw.randbytes(2000)


def _frame_of_16_mib(draw: random.Random) -> bytes:
    kind = draw.choice([http2.DATA, http2.HEADERS, http2.SETTINGS, http2.CONTINUATION, 0xEE])
    return http2.opening() + http2.frame(kind, 0, 1, draw.randbytes(3000), 2**24 - 1)


def _headers_without_end(draw: random.Random) -> bytes:
    block = http2.header(b"x" * 100, draw.randbytes(100)) * 50
    more = http2.frame(http2.CONTINUATION, 0, 1, block) * 30
    return http2.opening() + http2.frame(http2.HEADERS, 0, 1, block) + more


def _pings(draw: random.Random) -> bytes:
    return http2.opening() + http2.frame(http2.PING, 0, 0, draw.randbytes(8)) * 500


def _many_streams(draw: random.Random) -> bytes:
    requests = (http2.request(_method(draw), 2 * number + 1) for number in range(200))
    return http2.opening() + b"".join(requests)


def _message_that_lies(draw: random.Random) -> bytes:
    claimed = draw.choice([2**32 - 1, 65 * 2**20, 2**20])
    body = http2.message(draw.randbytes(2000), claimed)
    return http2.opening() + http2.request(_method(draw), 1) + http2.frame(http2.DATA, 0, 1, body)


def _large_message(draw: random.Random) -> bytes:
    """Return a message with a large unknown field, beyond one HTTP/2 window."""
    data = b"\xfa\x01" + b"\xc0\x84\x3d" + bytes(1_000_000)
    return http2.opening() + http2.call(_method(draw), data)


def _deep_message(draw: random.Random) -> bytes:
    return http2.opening() + http2.call(_method(draw), b"\x0b" * draw.choice([99, 5000]))


def _method(draw: random.Random) -> str:
    """Choose a method; an empty message to it has no effect."""
    services = {"Control": "Describe", "Rendezvous": "Set", "Snapshots": "Fetch"}
    service = draw.choice(list(services))
    return f"/rpcmp.v1.{service}/{services[service]}"


_OVERSIZED: list[Callable[[random.Random], bytes]] = [
    _greeting_of_4_gib,
    _deep_greeting,
    _long_number,
    _record_that_lies,
    _frame_of_16_mib,
    _headers_without_end,
    _pings,
    _many_streams,
    _message_that_lies,
    _large_message,
    _deep_message,
]

_MAKERS: dict[Callable[[random.Random, Iterator[bytes]], bytes], int] = {
    noise: 20,
    truncated: 25,
    flipped: 25,
    spliced: 10,
    whole: 5,
    oversized: 15,
}
"""Kinds of inputs with their relative frequencies."""
