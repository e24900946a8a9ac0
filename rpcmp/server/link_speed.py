"""The link test, which measures the way to a server before a run.

It uses a connection as the run will have it, without gRPC:

    client ──measure──> server
           ──ping────>         <──clock──       a few times: round trip and clock offset
           ──take N, N bytes─> <──done──        increasing, until it takes long enough
           ──give N──>         <──N bytes──

The first, small portions also open TCP's window.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from rpcmp.errors import RelayError, SecurityError, UnreachableError, one_line
from rpcmp.net.identity import RELAY
from rpcmp.net.peer_connection import CHUNK, OPEN_SECONDS, Dialer, PeerConnection
from rpcmp.server.connection import IS_IT_RUNNING

PINGS = 20

FIRST_LINK_TEST_BYTES = 2**20
MAX_LINK_TEST_BYTES = 2**32

LINK_TEST_SECONDS = 60.0
"""Time limit for a measurement; a slower link needs no more precision."""

_ZEROS = bytes(CHUNK)


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


async def measure_over(end: PeerConnection, seconds: float) -> LinkSpeed:
    """Measure over a fresh connection to a server's relay.

    Args:
        seconds: least duration of the transfer in each direction; 0: only measure round trips.
    """
    await end.write_message({"op": "measure"})
    way = await _ping(end)
    if not seconds:
        return way
    there = await _speed(partial(_upload, end), seconds, way.latency_s)
    back = await _speed(partial(_download, end), seconds, way.latency_s)
    return replace(way, there=there, back=back)


async def answer_link_test(end: PeerConnection) -> None:
    """Serve a measurement until the client hangs up; raises RelayError for an invalid request."""
    async with asyncio.timeout(LINK_TEST_SECONDS):
        while True:
            await _yield_to_others()
            request = await end.read_message()
            count = request.get("bytes", 0)
            if not isinstance(count, int) or not 0 <= count <= MAX_LINK_TEST_BYTES:
                raise RelayError(f"it asks to measure with {count!r} bytes")
            match request.get("op"):
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
    pings = []
    for _ in range(PINGS):
        sent, began = time.time(), time.perf_counter()
        await end.write_message({"op": "ping"})
        clock = (await end.read_message()).get("clock")
        took = time.perf_counter() - began
        if not isinstance(clock, float):
            raise RelayError("it does not say what its clock shows")
        pings.append(LinkSpeed(took, clock - (sent + took / 2)))
    pings.sort(key=lambda ping: ping.latency_s)
    return replace(pings[PINGS // 2], clock_ahead_s=pings[0].clock_ahead_s)


async def _speed(
    transfer: Callable[[int], Awaitable[None]], seconds: float, latency_s: float
) -> float:
    """Return the bytes per second of a transfer that takes long enough."""
    count = FIRST_LINK_TEST_BYTES
    while True:
        began = time.perf_counter()
        await transfer(count)
        took = time.perf_counter() - began
        if took >= seconds or count >= MAX_LINK_TEST_BYTES:
            return count / max(took - latency_s, took / 2)
        count = min(4 * count, MAX_LINK_TEST_BYTES)


async def _upload(end: PeerConnection, count: int) -> None:
    await end.write_message({"op": "take", "bytes": count})
    await _fill(end, count)
    await end.read_message()


async def _download(end: PeerConnection, count: int) -> None:
    await end.write_message({"op": "give", "bytes": count})
    await _discard(end, count)


async def _fill(end: PeerConnection, count: int) -> None:
    while count:
        await _yield_to_others()
        part = _ZEROS[:count]
        await end.write(part)
        count -= len(part)


async def _discard(end: PeerConnection, count: int) -> None:
    while count:
        await _yield_to_others()
        count -= len(await end.read_some(count))


async def _yield_to_others() -> None:
    """Yield to the event loop, which a socket that is always ready would occupy."""
    await asyncio.sleep(0)


PING_SECONDS = 10.0
"""Time limit for a few round trips."""

SEND_SECONDS = 60.0
"""Time limit for a transfer in each direction."""

MEASURE_SECONDS = OPEN_SECONDS + SEND_SECONDS
"""Time limit for a server that measures its link to another, connecting included."""


async def measure_link(
    dialer: Dialer, name: str, address: str, stage_index: int | None, seconds: float
) -> LinkSpeed:
    """Measure the link to a stage's server, without gRPC.

    Args:
        name: the stage's, for errors.
        stage_index: the stage that the server's certificate has to be for; None: any.
        seconds: least duration of the transfer in each direction; 0: only measure round trips.

    Raises:
        UnreachableError: no connection, or one that carries next to nothing.
        SecurityError: the server is not the expected one, or refuses our certificate.
    """
    try:
        connection = await dialer.open(address, RELAY, stage_index)
    except UnreachableError as error:
        raise UnreachableError(f"stage {name!r}: {error}; {IS_IT_RUNNING}") from error
    except SecurityError as error:
        raise SecurityError(f"stage {name!r}: {error}") from error
    where = f"stage {name!r} at {address}"
    try:
        return await _measure(dialer, connection, where, seconds)
    except (EOFError, RelayError) as error:
        hint = "" if dialer.security.credentials else "; does its server want --certs?"
        raise UnreachableError(f"{where} does not let itself be measured: {error}{hint}") from error
    finally:
        connection.close()


async def _measure(dialer: Dialer, end: PeerConnection, where: str, seconds: float) -> LinkSpeed:
    limit = SEND_SECONDS if seconds else PING_SECONDS
    try:
        async with asyncio.timeout(limit):
            return await measure_over(end, seconds)
    except TimeoutError as error:
        raise UnreachableError(
            f"{where}: the way there carries next to nothing, {limit:.0f} s did not do to measure "
            "it; look for a firewall, or an MTU that is too large"
        ) from error
    except ssl.SSLError as error:  # with TLS 1.3 the first read tells whether the server accepts us
        raise SecurityError(f"{where} refuses us: {dialer.refusal(error)}") from error
    except OSError as error:
        raise UnreachableError(f"lost {where} while measuring: {one_line(error)}") from error
