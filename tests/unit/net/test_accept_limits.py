"""Limits of the number of connections, and which connection is closed."""

from __future__ import annotations

from functools import partial

from rpcmp.net.accept import Budget, Guest


class LimitedPort:
    """Admits connections within a budget, and records which were closed."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.ended: list[str] = []

    def open(self, peer: str, name: str) -> Guest | None:
        """Open a connection; a closed one leaves the budget at once."""
        while not self.budget.has_room():
            assert self.ended, "there is no room, and no connection was ended"
        found: list[Guest] = []

        def end() -> None:
            self.ended.append(name)
            self.budget.remove(found[0])

        guest = self.budget.admit(peer, end)
        found += [] if guest is None else [guest]
        return guest


def test_the_oldest_unauthenticated_connection_of_the_busiest_peer_is_closed() -> None:
    port = LimitedPort(Budget(most=100, unauthenticated=4))
    for peer, name in [("b", "b1"), ("a", "a1"), ("a", "a2"), ("a", "a3")]:
        assert port.open(peer, name) is not None
    for number in range(4, 9):
        assert port.open("a", f"a{number}") is not None
    assert port.ended == ["a1", "a2", "a3", "a4", "a5"]  # and never b1


def test_an_authenticated_connection_stays() -> None:
    budget = Budget(most=3, unauthenticated=3)
    port = LimitedPort(budget)
    for number in range(2):
        guest = port.open("a", f"proven{number}")
        assert guest is not None
        budget.authenticate(guest)
    for number in range(5):
        assert port.open("b", f"stranger{number}") is not None
    assert port.ended == ["stranger0", "stranger1", "stranger2", "stranger3"]


def test_a_connection_is_refused_if_all_open_ones_are_authenticated() -> None:
    budget = Budget(most=1, unauthenticated=1)
    port = LimitedPort(budget)
    guest = port.open("a", "first")
    assert guest is not None
    budget.authenticate(guest)
    assert port.open("b", "second") is None
    budget.remove(guest)
    assert port.open("b", "third") is not None
    assert port.ended == []


def test_a_peer_is_limited_to_its_share() -> None:
    budget = Budget(most=10, unauthenticated=10, per_peer=2)
    port = LimitedPort(budget)
    for number in range(2):
        guest = port.open("a", f"a{number}")
        assert guest is not None
        budget.authenticate(guest)
    assert port.open("a", "a2") is None
    assert port.open("b", "b0") is not None


def test_an_ended_connection_counts_until_it_is_removed() -> None:
    budget = Budget(most=2, unauthenticated=2)
    ended: list[int] = []
    guests = [budget.admit("a", partial(ended.append, number)) for number in range(2)]
    assert not budget.has_room()
    assert not budget.has_room()
    assert ended == [0]
    assert guests[0] is not None
    budget.remove(guests[0])
    assert budget.has_room()


def test_connections_without_a_certificate_have_a_deadline() -> None:
    budget = Budget(most=5, unauthenticated=5, seconds=-1.0)  # it is over at once
    ended: list[str] = []
    guest = budget.admit("a", lambda: ended.append("proven"))
    assert guest is not None
    budget.authenticate(guest)
    budget.admit("a", lambda: ended.append("stranger"))
    budget.expire()
    budget.expire()
    assert ended == ["stranger"]
    budget.end_all()
    assert ended == ["stranger", "proven"]
