"""Connections of a client to servers that are absent, or still starting."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from rpcmp.errors import CheckpointError, UnreachableError
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from rpcmp.v1 import control_pb2 as pb
from tests.support.eventloops import in_event_loop

LONG = 3600.0
"""A timeout in seconds; no test waits so long."""


@pytest.fixture
def address() -> Iterator[str]:
    """Yield an address without a listener, reserved so that a test can listen there."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


async def describe(request: pb.DescribeRequest, context: object) -> pb.DescribeResponse:
    return pb.DescribeResponse(job="mine")


DESCRIBING = grpc.method_handlers_generic_handler(
    "rpcmp.v1.Control",
    {
        "Describe": grpc.unary_unary_rpc_method_handler(
            describe, pb.DescribeRequest.FromString, pb.DescribeResponse.SerializeToString
        )
    },
)


async def put(requests: AsyncIterator[pb.PutRequest], context: object) -> pb.PutResponse:
    async for _ in requests:
        pass
    return pb.PutResponse()


PUTTING = grpc.method_handlers_generic_handler(
    "rpcmp.v1.Snapshots",
    {
        "Put": grpc.stream_unary_rpc_method_handler(
            put, pb.PutRequest.FromString, pb.PutResponse.SerializeToString
        )
    },
)


def why_not(name: str, address: str, insecure: bool) -> str:
    """Return the error for an unreachable server that is not starting either."""

    async def connect() -> None:
        async with StageClient(name, address, Dialer(Security(None, insecure))) as client:
            await client.connect(LONG, starting=False)

    with pytest.raises(UnreachableError) as error:
        asyncio.run(connect())
    return str(error.value)


@pytest.mark.parametrize("insecure", [False, True])
def test_connect_fails_at_once_if_the_connection_is_refused(address: str, insecure: bool) -> None:
    assert re.search(f"stage 'a'.* {address}.*refused", why_not("a", address, insecure))


def test_errors_name_a_server_without_stage_by_its_address(address: str) -> None:
    """`rpcmp drain` gives an address only; the error suggests a next step."""
    message = why_not("", address, insecure=False)
    assert message.startswith(f"{address} cannot be reached: Connection refused; is `rpcmp serve`")


@in_event_loop
async def test_connect_waits_for_a_server_that_is_starting(address: str) -> None:
    async with StageClient("a", address, Dialer(Security(None))) as client:
        connecting = asyncio.create_task(client.connect(LONG))
        assert client._tunnel is not None
        assert "refused" in str(await client._tunnel.absent)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((DESCRIBING,))
        server.add_insecure_port(address)
        await server.start()
        try:
            assert (await connecting).job == "mine"
        finally:
            await server.stop(None)


@in_event_loop
async def test_what_cannot_be_read_for_a_server_is_the_error(address: str) -> None:
    """gRPC cancels a call whose messages cannot be read, and says no more."""

    async def parts(is_readable: bool) -> AsyncIterator[pb.PutRequest]:
        yield pb.PutRequest(data=b"first")
        if not is_readable:
            raise CheckpointError("cannot read it any more")
        yield pb.PutRequest(data=b"second")

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((DESCRIBING, PUTTING))
    server.add_insecure_port(address)
    await server.start()
    try:
        async with StageClient("a", address, Dialer(Security(None))) as client:
            await client.connect(LONG)
            await client.put(parts(is_readable=True))
            with pytest.raises(CheckpointError, match="cannot read it any more"):
                await client.put(parts(is_readable=False))
    finally:
        await server.stop(None)
