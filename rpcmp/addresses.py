"""Addresses of stage servers: the default ports, and who may be listened to."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from rpcmp.errors import ConfigError

FIRST_PORT = 50051
PORTS_A_REPLICA = 100


def default_port(stage_index: int, replica: int = 0) -> int:
    """The port that a stage's server listens on unless told otherwise."""
    return FIRST_PORT + stage_index + PORTS_A_REPLICA * replica


def parse(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT" or "[IPV6]:PORT".

    Raises:
        ConfigError: it is no such thing.
    """
    host, separator, port = address.rpartition(":")
    odd = any(character.isspace() for character in host)
    if not separator or not host or odd or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not HOST:PORT, such as 127.0.0.1:{FIRST_PORT}")
    return host.strip("[]"), int(port)


def require_loopback(addresses: Iterable[str]) -> None:
    """Refuse addresses that other machines could reach: nothing is encrypted or authenticated yet.

    Raises:
        ConfigError: an address is not on loopback.
    """
    for address in addresses:
        host, _ = parse(address)
        if not _is_loopback(host):
            raise ConfigError(
                f"{address} is not a loopback address: whoever reaches a stage server runs code on "
                "its host, and connections are not authenticated yet. Use 127.0.0.1"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
