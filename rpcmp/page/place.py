"""Where the page is served, and for whom: anybody on this machine, or who has the run's token.

On loopback only processes of this machine reach it; a browser of this machine is one of them,
whatever page it shows, so the guard looks at the names that it uses (see rpcmp.page.guard).
Elsewhere the connection is encrypted and the token keeps strangers out.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rpcmp import addresses
from rpcmp.errors import ConfigError
from rpcmp.wire.certificate import Certificate
from rpcmp.wire.credentials import Credentials
from rpcmp.wire.security import is_loopback

PORT = 8265
"""Where a bare `--ui` serves, if it is free."""


@dataclass(frozen=True)
class Place:
    """A socket that is listened on, and who may connect to it.

    Attributes:
        listener: the socket.
        host: the name by which browsers reach it.
        token: what they have to know; None: nothing.
        certs: folder of the certificate; None: connections are not encrypted.
    """

    listener: socket.socket
    host: str
    token: str | None = None
    certs: Path | None = None

    @classmethod
    def open(cls, address: str | None, certs: Path | None) -> Self:
        """Listen at "HOST:PORT", ":PORT" or "PORT"; at PORT, or any that is free, for None.

        Raises:
            ConfigError: that is no address, one that cannot be listened on, or one that others
                reach although there is no certificate.
            SecurityError: the certificate cannot be used.
        """
        if address is None:
            try:
                return cls(_listen(addresses.HERE, PORT), addresses.HERE)
            except OSError:
                return cls(_listen(addresses.HERE, 0), addresses.HERE)
        host, port = parse(address)
        if is_loopback(host):
            return cls(_open(host, port), host)
        if certs is None:
            raise ConfigError(
                f"--ui {address}: other machines reach that address, so the page needs a "
                "certificate: give --certs DIR/driver, which `rpcmp certs issue DIR --driver "
                f"--host {socket.gethostname()}` makes; or serve it on 127.0.0.1, and reach it by "
                f"`ssh -L {port or PORT}:127.0.0.1:{port or PORT} {socket.gethostname()}`"
            )
        Credentials(certs)
        named = Certificate.load(certs).hosts
        return cls(_open(host, port), _name(host, named), secrets.token_urlsafe(32), certs)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self.listener.getsockname()[1])

    @property
    def url(self) -> str:
        """What to open; it has the token in it."""
        where = addresses.joined(self.host, self.port)
        return f"http://{where}/" if self.token is None else f"https://{where}/?token={self.token}"


def parse(address: str) -> tuple[str, int]:
    """Host and port; the host is this machine where it is left out.

    Raises:
        ConfigError: that is no address.
    """
    given = address.removeprefix(":")
    try:
        return addresses.parse(f"{addresses.HERE}:{given}" if given.isdecimal() else address)
    except ConfigError:
        raise ConfigError(
            f"--ui {address!r} is not [HOST:]PORT, such as 127.0.0.1:{PORT}; a bare --ui comes "
            "after CONFIG"
        ) from None


def _open(host: str, port: int) -> socket.socket:
    try:
        return _listen(host, port)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--ui {host}:{port}: cannot listen there: {reason}") from error


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket: whoever connects before the server runs waits, and is not refused."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, where = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _name(host: str, named: list[str]) -> str:
    """How browsers reach `host`: by a name of the certificate, which they compare."""
    if host in named or (not named and host not in ("0.0.0.0", "::")):
        return host
    return named[0] if named else socket.gethostname()
