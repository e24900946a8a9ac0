"""Refusals and statistics of a relay; test_front, test_tunnel_splice and test_lan carry bytes."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import cast

import pytest

from rpcmp.errors import JobError, RelayError, UnreachableError, WorkerDiedError
from rpcmp.net.peer_connection import HEADER, Dialer, PeerConnection
from rpcmp.net.port import IncomingConnection, PortMultiplexer
from rpcmp.net.relay import Relay, RelayPeer
from rpcmp.net.security import Security
from rpcmp.process.fork_client import Forks, NetworkOf
from tests.support.eventloops import in_event_loop


class OnTheHostsLoopback:
    """A fork server without private networks."""

    async def network(self) -> NetworkOf:
        return NetworkOf("host-a", is_private=False, reason="Operation not permitted")

    async def listener(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))


class WithoutPorts(OnTheHostsLoopback):
    """A fork server on a host where every port is taken."""

    async def listener(self) -> socket.socket:
        raise JobError("the system refuses it: Address already in use")


class InOneNetwork(OnTheHostsLoopback):
    """A fork server whose processes have the test's network."""

    async def network(self) -> NetworkOf:
        return NetworkOf("host-a", is_private=True, reason="")


PEER = RelayPeer("b:0", "127.0.0.1:40001", "host-b:50052", 1)


def relay_of(name: str, by: OnTheHostsLoopback) -> Relay:
    return Relay("job", 1, name, cast("Forks", by), Dialer(Security()), print, print)


def test_a_host_without_ports_asks_for_fresh_processes() -> None:
    relay = relay_of("a:0", WithoutPorts())
    with pytest.raises(WorkerDiedError, match=r"connections to b:0: .*Address already in use"):
        asyncio.run(relay.reserve(["b:0"]))


@in_event_loop
async def test_members_of_one_network_reach_a_peer_at_an_address_of_their_own_each() -> None:
    """Or the kernel would let one of their relays accept what the other's member has sent."""

    relays = [relay_of(name, OnTheHostsLoopback()) for name in ("a:0", "driver")]
    dialled = [(await relay.reserve(["b:0", "c:0"])) for relay in relays]
    addresses = [address for each in dialled for address in each.values()]
    assert len({*addresses, PEER.listens}) == 5
    other = RelayPeer("c:0", PEER.listens, "host-c:50053", 2)  # the same port by chance
    for relay, address in zip(relays, (each["b:0"] for each in dialled), strict=True):
        await relay.open("127.0.0.1:40000", [PEER, other])
        beat = {"event": "beat", "ways": [[address, 1, 2, 0.5], ["127.0.0.1:1", 3, 4, 0.5]]}
        ways = [(PEER.listens, 1, 2, 0.5), ("127.0.0.1:1", 3, 4, 0.5)]
        assert relay.with_agents(beat) == {"event": "beat", "ways": ways}
        assert relay.with_agents({"event": "beat"}) == {"event": "beat"}
    for relay in relays:
        await relay.close()


def test_a_peer_that_was_not_said_to_be_elsewhere_is_refused() -> None:
    """The member has its own address by then, and connections to it would lead anywhere."""
    relay = relay_of("a:0", OnTheHostsLoopback())
    with pytest.raises(RelayError, match="b:0 was not said to be in another network"):
        asyncio.run(relay.open("127.0.0.1:40000", [PEER]))


def test_a_relay_that_is_closed_meanwhile_leaves_no_listener() -> None:
    opened: list[socket.socket] = []

    class Slow(OnTheHostsLoopback):
        async def listener(self) -> socket.socket:
            opened.append(await super().listener())
            await relay.close()
            return opened[0]

    relay = relay_of("a:0", Slow())
    with pytest.raises(RelayError, match="the group has ended"):
        asyncio.run(relay.reserve(["b:0"]))
    assert opened[0].fileno() == -1


def test_round_trips_are_measured_to_the_other_host() -> None:
    relay = relay_of("a:0", OnTheHostsLoopback())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = PeerConnection(socket.create_connection(listener.getsockname()))
        assert relay.round_trips == {}
        relay._carried[there] = "127.77.0.2:40001"
        (found,) = relay.round_trips.items()
        assert found[0] == "127.77.0.2:40001"
        assert 0 < found[1] < 10
        there.close()
        assert relay.round_trips == {}


async def carried_after(num_broken: int, unreachable: list[UnreachableError]) -> tuple[bytes, int]:
    """Send a message to a peer whose server breaks the first connections; return what arrives.

    Args:
        unreachable: gets the errors that the relay reports.
    """
    greetings, arrived = 0, b""

    async def serve(incoming: IncomingConnection) -> None:
        nonlocal greetings, arrived
        greetings += 1
        if greetings <= num_broken:
            incoming.end.abort()
            return
        assert (await incoming.end.read_message())["op"] == "connect"
        await incoming.end.write_message({"go": True})
        (size,) = HEADER.unpack(await incoming.end.read(HEADER.size))
        arrived = await incoming.end.read(size)
        await incoming.end.write(HEADER.pack(0))

    port = PortMultiplexer(Security(), serve, serve)
    relay = Relay(
        *("job", 1, "a:0", cast("Forks", InOneNetwork()), Dialer(Security()), print),
        on_unreachable=unreachable.append,
    )
    try:
        server = f"127.0.0.1:{await port.start('127.0.0.1', 0)}"
        peer = RelayPeer("b:0", PEER.listens, server, 1)
        dialled = await relay.reserve(["b:0"])
        await relay.open("127.0.0.1:40000", [peer])
        reader, writer = await asyncio.open_connection(*dialled["b:0"].split(":"))
        writer.write(b"hello")
        await reader.read()  # until the server hangs up
        writer.close()
        return arrived, greetings
    finally:
        await relay.close()
        await port.stop()


def test_a_connection_that_breaks_before_it_reaches_the_worker_is_opened_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker at this end cannot: for torch RPC, a lost connection is the end of the group."""
    monkeypatch.setattr("rpcmp.net.relay.RETRY_SECONDS", 0.01)
    errors: list[UnreachableError] = []
    assert asyncio.run(carried_after(2, errors)) == (b"hello", 3)
    assert errors == []


class WithoutDescriptors(InOneNetwork):
    """A fork server whose socket cannot be received, as this process may open no more files."""

    async def connectable(self) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("is_awaited", [True, False])
@in_event_loop
async def test_a_connection_that_another_host_counts_on_ends_the_group_if_it_fails_here(
    is_awaited: bool,
) -> None:
    """A driver's parked connection is the worker's as soon as it is used; others are awaited."""
    errors: list[UnreachableError] = []
    relay = Relay(
        *("job", 1, "driver", cast("Forks", WithoutDescriptors()), Dialer(Security()), print),
        on_unreachable=errors.append,
    )
    peer = RelayPeer("a:0", "127.77.0.2:40001", "host-a:50052", 0)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs, pytest.raises(OSError, match="Too many open files"):
        await relay._connect_to_worker(PeerConnection(ours), peer, is_awaited)
    await relay.close()
    expected = "a:0 at host-a:50052 cannot reach driver from here: OSError: [Errno 24] Too many"
    assert [str(error).startswith(expected) for error in errors] == [True] * (not is_awaited)


def test_there_is_a_second_try_after_a_time_in_which_all_may_have_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a laptop's sleep: its processes see at once that all their time is over."""
    monkeypatch.setattr("rpcmp.net.relay.OPEN_SECONDS", 0.0)
    monkeypatch.setattr("rpcmp.net.relay.RETRY_SECONDS", 0.0)
    dialled: list[RelayPeer] = []

    async def dial(relay: Relay, peer: RelayPeer, op: str) -> str:
        dialled.append(peer)
        if len(dialled) == 1:
            raise TimeoutError
        return "connection"

    monkeypatch.setattr(Relay, "_dial", dial)
    relay = relay_of("a:0", InOneNetwork())
    peer = RelayPeer("b:0", "127.0.0.1:1", "host-b:50052", 1)
    assert str(asyncio.run(relay._reach(peer))) == "connection"
    assert dialled == [peer, peer]


def test_a_server_that_breaks_every_connection_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rpcmp.net.relay.RETRY_SECONDS", 0.05)
    monkeypatch.setattr("rpcmp.net.relay.OPEN_SECONDS", 0.2)
    errors: list[UnreachableError] = []
    with pytest.raises(ConnectionError):
        asyncio.run(carried_after(1_000_000, errors))
    (error,) = errors  # torch RPC need not notice that its connection has ended
    assert str(error).startswith("a:0 cannot reach 127.0.0.1:")
    assert str(error) in caplog.text
