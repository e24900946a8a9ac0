"""What has gone from this process to the members of its group, and back.

Agents listen on loopback addresses, each at one of its own, so where a connection leads says whom
it is to. That can be told at the end that has opened it alone: the port of that end tells nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rpcmp.process import tcp

LOOPBACK = "127."

INCOMING = ""
"""Whom connections lead to that others have opened."""


class Way(NamedTuple):
    """All that went between this process and one peer, since the process began.

    Attributes:
        peer: HOST:PORT that connections lead to, or INCOMING; of tensors the member's name.
        sent, received: bytes.
        round_trip_s: of the fastest that is open; 0: none is.
    """

    peer: str
    sent: int
    received: int
    round_trip_s: float


class Traffic:
    """Counts what has gone over connections, also over those that are closed again."""

    def __init__(self) -> None:
        self._leads_to: dict[str, str] = {}
        self._listening: set[str] = set()
        self._open: dict[str, tcp.Info] = {}
        self._closed: dict[str, tuple[int, int]] = {}

    def read(self, sockets: Iterable[tuple[str, int]]) -> list[Way]:
        """What has gone over all connections to each address, and over those that others opened.

        Args:
            sockets: all that it has, by their identity in the kernel, and their descriptors.
        """
        found = {name: (fd, seen) for name, fd in sockets if (seen := tcp.info(fd)) is not None}
        for fd, seen in found.values():
            if seen.state == tcp.LISTEN:
                self._listening.add(tcp.own_address(fd))
        for name, (fd, seen) in found.items():
            if name not in self._leads_to and seen.state == tcp.ESTABLISHED:
                peer = tcp.peer_address(fd)
                if peer.startswith(LOOPBACK):
                    own = tcp.own_address(fd)
                    self._leads_to[name] = INCOMING if own in self._listening else peer
        self._forget(found)
        self._open = {name: found[name][1] for name in self._leads_to}
        return list(self._ways())

    def _forget(self, found: Iterable[str]) -> None:
        """Keep the counts of what is closed, and let go of it."""
        for name in self._leads_to.keys() - set(found):
            peer, last = self._leads_to.pop(name), self._open.get(name)
            if last is not None:
                sent, received = self._closed.get(peer, (0, 0))
                self._closed[peer] = sent + last.sent, received + last.received

    def _ways(self) -> Iterator[Way]:
        for peer in dict.fromkeys((*self._closed, *self._leads_to.values())):
            infos = [info for name, info in self._open.items() if self._leads_to[name] == peer]
            sent, received = self._closed.get(peer, (0, 0))
            yield Way(
                peer,
                sent + sum(info.sent for info in infos),
                received + sum(info.received for info in infos),
                min((info.round_trip_s for info in infos), default=0.0),
            )
