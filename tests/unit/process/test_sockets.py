"""The statistics of sockets and the resource usage of processes, as the kernel reports them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from rpcmp.process import activity, sockets
from rpcmp.process.sockets import INCOMING, Connections, Links, PeerTraffic, Traffic
from tests.support.processes import poll_for


class Ends:
    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self.listener.getsockname())
        self.client = socket.create_connection(self.listener.getsockname())
        self.accepted, _ = self.listener.accept()

    def close(self) -> None:
        for each in (self.client, self.accepted, self.listener):
            each.close()

    def send(self, count: int) -> None:
        """Send bytes from client to listener, and wait until they are acknowledged."""
        _send(self.client, self.accepted, count)


def _send(sender: socket.socket, receiver: socket.socket, count: int) -> None:
    before = sent(sender)
    sending = threading.Thread(target=sender.sendall, args=[bytes(count)])
    sending.start()
    while count:
        count -= len(receiver.recv(min(count, 65536)))
    sending.join()
    poll_for(lambda: sent(sender) > before, "what was sent to be acknowledged")


def sent(connection: socket.socket) -> int:
    found = sockets.info(connection.fileno())
    assert found is not None
    return found.sent


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def read(traffic: Traffic) -> dict[str, PeerTraffic]:
    return {way.peer: way for way in traffic.read(Links().watch())}


def test_info_counts_bytes_of_a_connection(ends: Ends) -> None:
    ends.send(100_000)
    _send(ends.accepted, ends.client, 500)
    found = sockets.info(ends.client.fileno())
    assert found is not None
    assert found.state == sockets.ESTABLISHED
    assert found.sent in (100_000, 100_001)  # the kernel counts the handshake as a byte
    assert found.received == 500
    assert 0 < found.round_trip_s < 10


def test_addresses_are_host_and_port(ends: Ends) -> None:
    own = "{}:{}".format(*ends.client.getsockname())
    assert sockets.peer_address(ends.client.fileno()) == ends.address
    assert sockets.own_address(ends.client.fileno()) == own
    assert sockets.own_address(ends.listener.fileno()) == ends.address
    assert sockets.peer_address(ends.listener.fileno()) == ""


def test_info_of_other_sockets_is_none() -> None:
    with contextlib.ExitStack() as stack:
        one, other = socket.socketpair()
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for each in (one, other, udp):
            stack.enter_context(each)
            assert sockets.info(each.fileno()) is None
        assert sockets.own_address(one.fileno()) == ""
    assert sockets.info(-1) is None


def test_traffic_is_counted_by_peer(ends: Ends) -> None:
    traffic = Traffic()
    ends.send(3000)
    found = read(traffic)
    assert found[ends.address].sent - 3000 in (0, 1)
    assert found[ends.address].received == 0
    assert found[ends.address].round_trip_s > 0
    assert found[INCOMING].received >= 3000


def test_connections_to_one_peer_are_added_up(ends: Ends) -> None:
    second = socket.create_connection(ends.listener.getsockname())
    accepted, _ = ends.listener.accept()
    with second, accepted:
        ends.send(1000)
        _send(second, accepted, 200)
        assert read(Traffic())[ends.address].sent - 1200 in (0, 1, 2)


def test_traffic_of_closed_connections_still_counts(ends: Ends) -> None:
    traffic = Traffic()
    ends.send(1000)
    before = read(traffic)[ends.address].sent
    ends.client.close()
    ends.accepted.close()
    assert read(traffic)[ends.address] == PeerTraffic(ends.address, before, 0, 0.0)
    again = socket.create_connection(ends.listener.getsockname())
    accepted, _ = ends.listener.accept()
    with again, accepted:
        _send(again, accepted, 50)
        assert read(traffic)[ends.address].sent - before in (50, 51)


def test_traffic_ignores_connections_beyond_loopback(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "peer_address", lambda fd: "192.0.2.1:443")
    assert read(Traffic()) == {}


def test_looks_at_many_connections_are_rare(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.send(3000)
    now, cost, used = 100.0, 0.0, itertools.count()
    monkeypatch.setattr("rpcmp.process.sockets.time.monotonic", lambda: now)
    monkeypatch.setattr("rpcmp.process.sockets.time.thread_time", lambda: cost * next(used))
    cheap = Connections()
    assert {way.peer for way in cheap.look() or []} == {INCOMING, ends.address}
    assert cheap.look() is not None
    cost = sockets.LOOK_SHARE  # a look takes what may be used in a second
    dear = Connections()
    assert dear.look() is not None
    now = 100.9
    assert dear.look() is None
    now = 101.1
    cost = 1.0
    assert dear.look() is not None
    now += sockets.LOOK_SECONDS
    assert dear.look() is not None


def test_usage_of_a_process_matches_the_kernels() -> None:
    process = psutil.Process()
    assert activity.resident_bytes(os.getpid()) == pytest.approx(process.memory_info().rss, rel=0.2)
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    spent = process.cpu_times()
    assert activity.cpu_seconds(os.getpid()) == pytest.approx(spent.user + spent.system, abs=0.5)


def test_usage_of_an_ended_process_is_zero() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert activity.resident_bytes(child) == 0
    assert activity.cpu_seconds(child) == 0.0


def test_a_socket_of_the_family_is_found_at_the_likely_process(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    inode, own, parent = os.fstat(ends.client.fileno()).st_ino, os.getpid(), os.getppid()
    looked: list[int] = []
    has_socket = sockets.has_socket

    def noted(pid: int, inode: int) -> bool:
        looked.append(pid)
        return has_socket(pid, inode)

    monkeypatch.setattr(sockets, "has_socket", noted)
    assert sockets.is_of_family(inode, parent, own)
    assert sockets.is_of_family(inode, own, own)
    assert looked == [own, own]
    for wrong in (0, 1, parent, 2**22):  # found all the same
        assert sockets.is_of_family(inode, parent, wrong)
    assert not sockets.is_of_family(inode, 2**22, own)  # it has the socket, and another parent
