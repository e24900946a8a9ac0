"""Bytes through two relays over real sockets: all arrive, and half-closed sides still receive."""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rpcmp.errors import RelayError
from rpcmp.net.identity import RELAY, TlsState
from rpcmp.net.peer_connection import HEADER, PeerConnection
from rpcmp.net.security import Credentials
from rpcmp.net.tunnel import splice
from tests.support.eventloops import in_event_loop
from tests.support.lan import issue

HERE = "127.0.0.1"

Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture(scope="module", params=[True, False], ids=["tls", "plain"])
def sessions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], tuple[TlsState | None, TlsState | None]]:
    """Return the TLS states of both sides of a connection; None if it is plain."""
    certs: Path = issue(tmp_path_factory.mktemp("certs"), HERE)
    client, server = Credentials(certs / "driver"), Credentials(certs / "stage0")
    if not request.param:
        return lambda: (None, None)
    return lambda: (TlsState(client.client(RELAY), HERE), TlsState(server.server()))


Make = Callable[[], tuple[TlsState | None, TlsState | None]]


def pair() -> Sockets:
    with socket.create_server((HERE, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setblocking(False)
    return one, other


def through(make: Make, use: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Call `use` with two sockets that are connected through two relays.

    use <─loopback─> relay <═TLS═> relay <─loopback─> use
    """

    async def run() -> None:
        (near, here), (there, far), between = pair(), pair(), pair()
        ends = [PeerConnection(between[0], make_pair[0]), PeerConnection(between[1], make_pair[1])]
        await asyncio.gather(*(end.do_handshake() for end in ends))
        for end in ends:
            end.has_frames = True
        carrying = [
            asyncio.create_task(splice(PeerConnection(here), ends[0])),
            asyncio.create_task(splice(PeerConnection(there), ends[1])),
        ]
        try:
            async with asyncio.timeout(60):
                await use(near, far)
        finally:
            near.close()
            far.close()
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)

    make_pair = make()
    asyncio.run(run())


async def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := await asyncio.get_running_loop().sock_recv(connection, 2**20):
        parts.append(part)
    return b"".join(parts)


def test_every_byte_arrives_both_ways_at_once(sessions: Make) -> None:
    async def use(near: socket.socket, far: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        draw = random.Random(5)
        sizes = [1, 3, 5, 16384, 16385, 262143, 262144, 262145, *draw.choices(range(1, 10**6), k=9)]
        there, back = (b"".join(draw.randbytes(size) for size in sizes) for _ in range(2))

        async def send(connection: socket.socket, data: bytes) -> None:
            at = 0
            while at < len(data):
                size = draw.choice(sizes)
                await loop.sock_sendall(connection, data[at : at + size])
                at += size
            connection.shutdown(socket.SHUT_WR)

        arrived = await asyncio.gather(
            read_all(far), read_all(near), send(near, there), send(far, back)
        )
        assert arrived[0] == there
        assert arrived[1] == back

    through(sessions, use)


def test_pipelines_in_two_threads_do_not_get_each_others_bytes(sessions: Make) -> None:
    def carry(byte: bytes) -> bool:
        sent = byte * 40_000_000
        arrived = b""

        async def use(near: socket.socket, far: socket.socket) -> None:
            async def send() -> None:
                await asyncio.get_running_loop().sock_sendall(near, sent)
                near.shutdown(socket.SHUT_WR)

            nonlocal arrived
            arrived, _ = await asyncio.gather(read_all(far), send())

        through(sessions, use)
        return arrived == sent

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(carry, [b"a", b"b"]))


def test_a_half_closed_side_still_receives(sessions: Make) -> None:
    async def use(near: socket.socket, far: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(near, b"a question")
        near.shutdown(socket.SHUT_WR)
        assert await read_all(far) == b"a question"
        answer = random.Random(1).randbytes(3_000_000)
        sending = asyncio.create_task(loop.sock_sendall(far, answer))
        arrived = hashlib.sha256()
        size = 0
        while size < len(answer):
            part = await loop.sock_recv(near, 2**20)
            assert part
            arrived.update(part)
            size += len(part)
        await sending
        assert arrived.digest() == hashlib.sha256(answer).digest()
        far.shutdown(socket.SHUT_WR)
        assert await read_all(near) == b""

    through(sessions, use)


def test_data_that_is_not_read_is_not_buffered(sessions: Make) -> None:
    """The sender is held up when the kernel's buffers on the way are full."""

    async def use(near: socket.socket, far: socket.socket) -> None:
        sent, held = 0, 0
        while held < 50:
            try:
                sent += near.send(bytes(2**20))
                held = 0
            except BlockingIOError:
                held += 1
            await asyncio.sleep(0.01)
            assert sent < 100 * 2**20
        received = 0
        while received < sent:
            received += len(await asyncio.get_running_loop().sock_recv(far, 2**22))
        assert received == sent

    through(sessions, use)


@in_event_loop
async def test_a_broken_connection_differs_from_an_end_of_stream(sessions: Make) -> None:
    """A stream that is cut off must not look complete."""

    (near, here), between = pair(), pair()
    sides = sessions()
    ends = [PeerConnection(between[0], sides[0]), PeerConnection(between[1], sides[1])]
    await asyncio.gather(*(end.do_handshake() for end in ends))
    ends[0].has_frames = True
    carrying = asyncio.create_task(splice(PeerConnection(here), ends[0]))
    await ends[1].write(HEADER.pack(100) + b"only this much")
    assert await asyncio.get_running_loop().sock_recv(near, 100) == b"only this much"
    ends[1].close()
    with pytest.raises(RelayError, match="broke off"):
        await carrying
    with pytest.raises(ConnectionResetError):
        await asyncio.get_running_loop().sock_recv(near, 100)
    near.close()


@pytest.mark.parametrize(
    "bad", [b"\x7f\xff\xff\xffxxxx", HEADER.pack(3) + b"{]}", HEADER.pack(2) + b"[]"]
)
@in_event_loop
async def test_a_malformed_first_frame_is_refused(bad: bytes) -> None:

    one, other = pair()
    one.send(bad)
    with pytest.raises(RelayError, match="first frame"):
        await PeerConnection(other).read_message()
    one.close()
    other.close()


@in_event_loop
async def test_tampered_bytes_break_the_connection(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:

    certs = issue(tmp_path_factory.mktemp("certs"), HERE)
    one, other = pair()
    ends = [
        PeerConnection(one, TlsState(Credentials(certs / "driver").client(RELAY), HERE)),
        PeerConnection(other, TlsState(Credentials(certs / "stage0").server())),
    ]
    await asyncio.gather(*(end.do_handshake() for end in ends))
    session = ends[0].session
    assert session is not None
    session.encrypt(b"a gradient")
    data = bytearray(session.to_send())
    data[-1] ^= 1
    one.send(data)
    with pytest.raises(ssl.SSLError):
        await ends[1].read(1)
    for end in ends:
        end.abort()
