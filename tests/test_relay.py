"""What a relay refuses to carry; what it carries is in test_front, test_splice and test_lan."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from rpcmp.errors import JobError, SecurityError, WorkerDiedError
from rpcmp.process.forking import Forks, NetworkOf
from rpcmp.wire.dialer import Dialer
from rpcmp.wire.relay import Peer, Relay
from rpcmp.wire.security import Security


class OnTheHostsLoopback:
    """A fork server where the kernel makes no networks, and somebody else has every port."""

    async def network(self) -> NetworkOf:
        return NetworkOf("host-a", is_private=False, reason="Operation not permitted")

    async def listener(self, host: str, port: int) -> None:
        raise JobError("the system refuses it: Address already in use")


def opened(peer: Peer) -> None:
    """Have a relay carry what goes to a peer."""
    relay = Relay("job", 1, cast("Forks", OnTheHostsLoopback()), Dialer(Security()))
    asyncio.run(relay.open("127.0.0.1:40000", [peer]))


@pytest.mark.parametrize("listens", ["10.0.0.1:40001", "0.0.0.0:40001", "[::]:40001"])
def test_a_peer_that_others_could_reach_is_refused(listens: str) -> None:
    with pytest.raises(SecurityError, match="for all to see"):
        opened(Peer(listens, "host-b:50052", 1))


def test_a_port_that_is_taken_is_no_end_but_a_reason_for_fresh_processes() -> None:
    with pytest.raises(WorkerDiedError, match=r"127\.0\.0\.1:40001.* fresh processes"):
        opened(Peer("127.0.0.1:40001", "host-b:50052", 1))
