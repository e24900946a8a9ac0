"""The connections from the front to the gRPC servers behind it, each with a name.

gRPC knows of a Unix socket's other end only the path that it is bound to. So the front binds its
end to a random path, and remembers which visitor it carries. A process of the same user can find
the sockets and connect to them too, but its connection has no such name, and no role.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rpcmp.errors import SecurityError
from rpcmp.wire.role import STRANGER, Role

if TYPE_CHECKING:
    from rpcmp.wire.front import Visitor


class Inner:
    """The named connections of one server.

    Args:
        folder: private to the server's user; holds the sockets.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._visitors: dict[str, Visitor] = {}

    def path(self) -> Path:
        """A fresh path for a socket; all are equally long, so a deep folder fits all or none."""
        return self._folder / secrets.token_hex(8)

    @contextlib.contextmanager
    def carrying(self, visitor: Visitor) -> Iterator[socket.socket]:
        """A socket to connect to a gRPC server, which sees the visitor's calls come from it."""
        path = self.path()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.setblocking(False)
            end.bind(str(path))
            path.unlink()  # the socket keeps its name
            self._visitors[path.name] = visitor
            try:
                yield end
            finally:
                del self._visitors[path.name]

    def knows(self, peer: str) -> bool:
        """Whether a call comes from the front.

        Args:
            peer: what gRPC says of the caller, "unix:" and the path, in which it quotes characters.
        """
        return _name(peer) in self._visitors

    def is_stranger(self, peer: str) -> bool:
        """Whether a caller is a process that the server does not work for.

        Args:
            peer: as in `knows`.
        """
        visitor = self._visitors.get(_name(peer))
        return visitor is not None and visitor.role == STRANGER

    def role(self, peer: str) -> Role | None:
        """Return the role in a caller's certificate; None if there are no certificates.

        Args:
            peer: as in `knows`.

        Raises:
            SecurityError: the call does not come from the front, or its connection is gone.
        """
        visitor = self._visitors.get(_name(peer))
        if visitor is None:
            raise SecurityError("the call did not come through the server's port")
        return visitor.role


def _name(peer: str) -> str:
    return peer.rpartition("/")[2]
