"""The owner of the other end of a loopback connection, which servers and clients check.

tests/system/test_localpeer.py has the tests that need a second user.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading

import pytest

from rpcmp.config.addresses import format_address
from rpcmp.errors import SecurityError, UnreachableError
from rpcmp.net import local_peer
from rpcmp.net.identity import RELAY
from rpcmp.net.local_peer import is_trusted, owner
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.port import IncomingConnection, PortMultiplexer
from rpcmp.net.security import Security
from tests.support.eventloops import in_event_loop

HERE = "127.0.0.1"


@pytest.mark.parametrize("host", [HERE, "::1"])
def test_the_kernel_names_the_owner_of_the_other_end(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener, socket.socket(family) as near:
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            assert owner(far) == owner(near) == os.geteuid()
            near.close()
            assert owner(far) is None


def test_a_connection_that_is_reset_meanwhile_has_no_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel then knows no other end, which must not count as a kernel that does not answer."""
    with socket.create_server((HERE, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asked: list[local_peer.Place] = []

        def ask(local: local_peer.Place, remote: local_peer.Place) -> None:
            asked.append(local)
            if len(asked) == 2:
                near.close()

        monkeypatch.setattr(local_peer, "_ask", ask)
        far, _ = listener.accept()
        with far:
            assert owner(far) is None
        assert len(asked) == 2


def test_the_kernel_names_the_owner_of_a_socket_of_both_protocols() -> None:
    with socket.create_server((HERE, 0)) as listener, socket.socket(socket.AF_INET6) as near:
        near.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        far, _ = listener.accept()
        with far:
            assert owner(far) == owner(near) == os.geteuid()
    both = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with both as listener, socket.create_connection((HERE, listener.getsockname()[1])) as near:
        far, _ = listener.accept()
        with far:
            assert owner(far) == owner(near) == os.geteuid()


def test_another_users_port_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched kernel query reports another user as the listener's owner."""
    ask, other = local_peer._ask, os.geteuid() + 1

    def others(local: local_peer.Place, remote: local_peer.Place) -> local_peer.LocalSocket | None:
        found = ask(local, remote)
        return found and found._replace(uid=other)

    monkeypatch.setattr(local_peer, "_ask", others)
    with socket.create_server((HERE, 0)) as listener:
        address = f"{HERE}:{listener.getsockname()[1]}"
        with pytest.raises(SecurityError, match=rf"served by .*uid {other}\b.*, not by you"):
            asyncio.run(Dialer(Security()).open(address, RELAY, None))


@pytest.mark.parametrize("is_accepted", [False, True])
def test_a_server_that_dies_meanwhile_counts_as_hung_up(is_accepted: bool) -> None:
    """The run then waits for it to come back; a SecurityError would end it."""
    listener = socket.create_server((HERE, 0))
    address = f"{HERE}:{listener.getsockname()[1]}"
    with socket.create_connection(listener.getsockname()) as near:
        far = listener.accept()[0] if is_accepted else None
        listener.close()
        if far is not None:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dying = threading.Timer(local_peer.LAST_WORDS / 5, far.close)
            dying.start()
        with pytest.raises(OSError, match=r"hung up|not connected"):
            local_peer._require_own_listener(near, address)
        if far is not None:
            dying.join()


def test_only_our_own_user_is_trusted() -> None:
    assert is_trusted(os.geteuid())
    assert not is_trusted(os.geteuid() + 1)
    assert not is_trusted(None)


def test_a_port_served_by_no_local_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that forwards a port into a container reports no listener."""
    ask = local_peer._ask

    def without_listeners(local: local_peer.Place, remote: local_peer.Place) -> object:
        return None if not remote[1] else ask(local, remote)

    monkeypatch.setattr(local_peer, "_ask", without_listeners)
    with (
        socket.create_server((HERE, 0)) as listener,
        pytest.raises(SecurityError, match="forwarded to a container"),
    ):
        asyncio.run(Dialer(Security()).open(f"{HERE}:{listener.getsockname()[1]}", RELAY, None))


@in_event_loop
async def test_a_kernel_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_peer, "_SOCK_DIAG", 31)  # there is no such service

    async def refuse(visitor: IncomingConnection) -> None:
        raise AssertionError("it has come in")

    front = PortMultiplexer(Security(), refuse, refuse)
    with pytest.raises(SecurityError, match=r"does not say whose.*--certs.*--insecure"):
        await front.start(HERE, 0)
    await front.stop()
    with socket.create_server((HERE, 0)) as listener:
        address = f"{HERE}:{listener.getsockname()[1]}"
        with pytest.raises(SecurityError, match=r"does not say whose.*--certs.*--insecure"):
            await Dialer(Security()).open(address, RELAY, None)


def test_dialing_a_server_that_never_accepts_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcmp.net.peer_connection.OPEN_SECONDS", 0.2)
    with (
        socket.create_server((HERE, 0)) as listener,
        pytest.raises(UnreachableError, match="does not answer within"),
    ):
        asyncio.run(Dialer(Security()).open(f"{HERE}:{listener.getsockname()[1]}", RELAY, None))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@in_event_loop
async def test_a_process_dials_from_the_address_by_which_it_is_found(host: str) -> None:

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        address = format_address(*listener.getsockname()[:2])
        dialing = asyncio.create_task(Dialer(Security()).open(address, RELAY, None))
        accepted, _ = await asyncio.to_thread(listener.accept)
        with accepted, (await dialing).socket:
            likely = os.getpid() if family == socket.AF_INET else 0
            assert local_peer._likely(accepted) == likely
            for parent in (os.getpid(), os.getppid(), 0):
                assert await local_peer.works_here(accepted, parent)
            assert not await local_peer.works_here(accepted, 2**22)
