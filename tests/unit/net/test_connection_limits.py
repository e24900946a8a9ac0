"""Limits of the number of connections, and which connection is closed."""

from __future__ import annotations

from functools import partial

from rpcmp.net.connection_limits import AdmittedConnection, ConnectionLimit


class LimitedPort:
    """Admits connections within a limit, and records which were closed."""

    def __init__(self, limit: ConnectionLimit) -> None:
        self.limit = limit
        self.ended: list[str] = []

    def open(self, peer: str, name: str) -> AdmittedConnection | None:
        """Open a connection; a closed one is removed at once."""
        while not self.limit.has_room():
            assert self.ended, "there is no room, and no connection was ended"
        found: list[AdmittedConnection] = []

        def end() -> None:
            self.ended.append(name)
            self.limit.remove(found[0])

        admitted = self.limit.admit(peer, end)
        found += [] if admitted is None else [admitted]
        return admitted


def test_the_oldest_unauthenticated_connection_of_the_busiest_peer_is_closed() -> None:
    port = LimitedPort(ConnectionLimit(max_connections=100, max_unauthenticated=4))
    for peer, name in [("b", "b1"), ("a", "a1"), ("a", "a2"), ("a", "a3")]:
        assert port.open(peer, name) is not None
    for number in range(4, 9):
        assert port.open("a", f"a{number}") is not None
    assert port.ended == ["a1", "a2", "a3", "a4", "a5"]  # and never b1


def test_an_authenticated_connection_stays() -> None:
    limit = ConnectionLimit(max_connections=3, max_unauthenticated=3)
    port = LimitedPort(limit)
    for number in range(2):
        admitted = port.open("a", f"proven{number}")
        assert admitted is not None
        limit.authenticate(admitted)
    for number in range(5):
        assert port.open("b", f"stranger{number}") is not None
    assert port.ended == ["stranger0", "stranger1", "stranger2", "stranger3"]


def test_a_connection_is_refused_if_all_open_ones_are_authenticated() -> None:
    limit = ConnectionLimit(max_connections=1, max_unauthenticated=1)
    port = LimitedPort(limit)
    admitted = port.open("a", "first")
    assert admitted is not None
    limit.authenticate(admitted)
    assert port.open("b", "second") is None
    limit.remove(admitted)
    assert port.open("b", "third") is not None
    assert port.ended == []


def test_a_peer_is_limited_to_its_share() -> None:
    limit = ConnectionLimit(max_connections=10, max_unauthenticated=10, max_per_peer=2)
    port = LimitedPort(limit)
    for number in range(2):
        admitted = port.open("a", f"a{number}")
        assert admitted is not None
        limit.authenticate(admitted)
    assert port.open("a", "a2") is None
    assert port.open("b", "b0") is not None


def test_an_ended_connection_counts_until_it_is_removed() -> None:
    limit = ConnectionLimit(max_connections=2, max_unauthenticated=2)
    ended: list[int] = []
    admitted = [limit.admit("a", partial(ended.append, number)) for number in range(2)]
    assert not limit.has_room()
    assert not limit.has_room()
    assert ended == [0]
    assert admitted[0] is not None
    limit.remove(admitted[0])
    assert limit.has_room()


def test_connections_without_a_certificate_have_a_deadline() -> None:
    limit = ConnectionLimit(
        max_connections=5, max_unauthenticated=5, seconds=-1.0
    )  # it is over at once
    ended: list[str] = []
    admitted = limit.admit("a", lambda: ended.append("proven"))
    assert admitted is not None
    limit.authenticate(admitted)
    limit.admit("a", lambda: ended.append("stranger"))
    limit.expire()
    limit.expire()
    assert ended == ["stranger"]
    limit.end_all()
    assert ended == ["stranger", "proven"]
