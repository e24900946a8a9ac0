"""Refusals and statistics of a relay; test_front, test_tunnel_splice and test_lan carry bytes."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest

from rpcmp.errors import JobError, SecurityError, WorkerDiedError
from rpcmp.net.peer_connection import Dialer, PeerConnection
from rpcmp.net.relay import Relay, RelayPeer
from rpcmp.net.security import Security
from rpcmp.process.fork_client import Forks, NetworkOf


class OnTheHostsLoopback:
    """A fork server without private networks, on a host where every port is taken."""

    async def network(self) -> NetworkOf:
        return NetworkOf("host-a", is_private=False, reason="Operation not permitted")

    async def listener(self, host: str, port: int) -> None:
        raise JobError("the system refuses it: Address already in use")


def open_relay_to(peer: RelayPeer) -> None:
    relay = Relay("job", 1, "a:0", cast("Forks", OnTheHostsLoopback()), Dialer(Security()), print)
    asyncio.run(relay.open("127.0.0.1:40000", [peer]))


@pytest.mark.parametrize("listens", ["10.0.0.1:40001", "0.0.0.0:40001", "[::]:40001"])
def test_a_peer_that_listens_beyond_loopback_is_refused(listens: str) -> None:
    with pytest.raises(SecurityError, match="for all to see"):
        open_relay_to(RelayPeer("b:0", listens, "host-b:50052", 1))


def test_a_port_that_is_taken_asks_for_fresh_processes() -> None:
    with pytest.raises(WorkerDiedError, match=r"127\.0\.0\.1:40001.* fresh processes"):
        open_relay_to(RelayPeer("b:0", "127.0.0.1:40001", "host-b:50052", 1))


def test_round_trips_are_measured_to_the_other_host() -> None:
    relay = Relay("job", 1, "a:0", cast("Forks", OnTheHostsLoopback()), Dialer(Security()), print)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = PeerConnection(socket.create_connection(listener.getsockname()))
        assert relay.round_trips == {}
        relay._carried[there] = "127.77.0.2:40001"
        (found,) = relay.round_trips.items()
        assert found[0] == "127.77.0.2:40001"
        assert 0 < found[1] < 10
        there.close()
        assert relay.round_trips == {}
