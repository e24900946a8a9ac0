"""Measure the link between two hosts before a run, over connections as the run will have them.

    client ──measure──> server
           ──ping────>         <──clock──       a few times: round trip and clock offset
           ──take N, N bytes─> <──done──        increasing, until it takes long enough
           ──give N──>         <──N bytes──

The first, small portions also open TCP's window.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from rpcmp.errors import RelayError
from rpcmp.net.tls import CHUNK, PeerConnection

PINGS = 20

FIRST_BYTES = 2**20
MAX_BYTES = 2**32

ANSWER_SECONDS = 60.0
"""Time limit for a measurement; a slower link needs no more precision."""

_NOTHING = bytes(CHUNK)


@dataclass(frozen=True)
class LinkSpeed:
    """The link from one host to another.

    Attributes:
        latency_s: seconds of a round trip, the median.
        clock_ahead_s: seconds that the other clock is ahead of ours, known to half a latency.
        there, back: bytes per second; 0: not measured.
    """

    latency_s: float
    clock_ahead_s: float
    there: float = 0.0
    back: float = 0.0


async def measure(end: PeerConnection, seconds: float) -> LinkSpeed:
    """Measure over a fresh connection to a server's relay.

    Args:
        seconds: least duration of the transfer in each direction; 0: only measure round trips.

    Raises:
        OSError, EOFError, RelayError: the connection broke, or the server has refused.
    """
    await end.write_message({"op": "measure"})
    way = await _ping(end)
    if not seconds:
        return way
    there = await _speed(lambda count: _put(end, count), seconds, way.latency_s)
    return replace(
        way, there=there, back=await _speed(lambda n: _get(end, n), seconds, way.latency_s)
    )


async def answer(end: PeerConnection) -> None:
    """Serve a measurement until the client hangs up.

    Raises:
        OSError, EOFError, RelayError, TimeoutError: the connection broke, or a request is invalid.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        while True:
            await _others_turn()
            asked = await end.read_message()
            count = asked.get("bytes", 0)
            if not isinstance(count, int) or not 0 <= count <= MAX_BYTES:
                raise RelayError(f"it asks to measure with {count!r} bytes")
            match asked.get("op"):
                case "ping":
                    await end.write_message({"clock": time.time()})
                case "take":
                    await _discard(end, count)
                    await end.write_message({"done": True})
                case "give":
                    await _fill(end, count)
                case other:
                    raise RelayError(f"it asks to measure {other!r}")


async def _ping(end: PeerConnection) -> LinkSpeed:
    found = []
    for _ in range(PINGS):
        sent, began = time.time(), time.perf_counter()
        await end.write_message({"op": "ping"})
        clock = (await end.read_message()).get("clock")
        took = time.perf_counter() - began
        if not isinstance(clock, float):
            raise RelayError("it does not say what its clock shows")
        found.append(LinkSpeed(took, clock - (sent + took / 2)))
    found.sort(key=lambda way: way.latency_s)
    return replace(found[PINGS // 2], clock_ahead_s=found[0].clock_ahead_s)


async def _speed(carry: Callable[[int], Awaitable[None]], seconds: float, latency: float) -> float:
    """Return the bytes per second of a transfer that takes long enough."""
    count = FIRST_BYTES
    while True:
        began = time.perf_counter()
        await carry(count)
        took = time.perf_counter() - began
        if took >= seconds or count >= MAX_BYTES:
            return count / max(took - latency, took / 2)
        count = min(4 * count, MAX_BYTES)


async def _put(end: PeerConnection, count: int) -> None:
    await end.write_message({"op": "take", "bytes": count})
    await _fill(end, count)
    await end.read_message()


async def _get(end: PeerConnection, count: int) -> None:
    await end.write_message({"op": "give", "bytes": count})
    await _discard(end, count)


async def _fill(end: PeerConnection, count: int) -> None:
    while count:
        await _others_turn()
        part = _NOTHING[:count]
        await end.write(part)
        count -= len(part)


async def _discard(end: PeerConnection, count: int) -> None:
    while count:
        await _others_turn()
        count -= len(await end.read_some(count))


async def _others_turn() -> None:
    """Yield to the event loop, which a socket that is always ready would occupy."""
    await asyncio.sleep(0)
