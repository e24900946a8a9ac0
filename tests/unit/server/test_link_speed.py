"""The link test over a real connection, and requests that the server refuses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rpcmp.errors import RelayError
from rpcmp.net.peer_connection import PeerConnection
from rpcmp.server import link_speed
from rpcmp.server.link_speed import MAX_LINK_TEST_BYTES, LinkSpeed


def talk(client: Callable[[PeerConnection], Awaitable[Any]]) -> tuple[Any, BaseException | None]:
    """Return the client's result, and the error that ended the server's side."""

    async def both() -> tuple[Any, BaseException | None]:
        ours, theirs = (PeerConnection(one) for one in socket.socketpair())
        serving = asyncio.ensure_future(serve(theirs))
        try:
            result = await client(ours)
        finally:
            ours.close()
            await asyncio.wait([serving])
            theirs.close()
        return result, serving.exception()

    return asyncio.run(both())


async def serve(end: PeerConnection) -> None:
    assert (await end.read_message())["op"] == "measure"
    await link_speed.answer_link_test(end)


def test_both_ways_are_measured() -> None:
    way, ended = talk(lambda end: link_speed.measure_over(end, 0.001))
    assert way.latency_s > 0
    assert min(way.there, way.back) > 0
    assert abs(way.clock_ahead_s) <= way.latency_s  # it is the same clock
    assert isinstance(ended, EOFError)


def test_a_link_test_without_seconds_measures_only_the_round_trip() -> None:
    way, _ = talk(lambda end: link_speed.measure_over(end, 0))
    assert way == LinkSpeed(way.latency_s, way.clock_ahead_s)


@pytest.mark.parametrize(
    "question",
    [
        {"op": "give", "bytes": MAX_LINK_TEST_BYTES + 1},
        {"op": "take", "bytes": -1},
        {"op": "take", "bytes": "many"},
        {"op": "connect"},
        {},
    ],
)
def test_a_client_with_an_invalid_request_is_disconnected(question: dict[str, Any]) -> None:
    async def ask(end: PeerConnection) -> None:
        await end.write_message({"op": "measure"})
        await end.write_message(question)

    _, ended = talk(ask)
    assert isinstance(ended, RelayError)
