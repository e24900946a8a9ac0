"""Addresses of stage servers, and their default ports."""

from __future__ import annotations

from urllib.parse import urlsplit

from rpcmp.errors import ConfigError

LOOPBACK = "127.0.0.1"
LOOPBACK_NAMES = frozenset({LOOPBACK, "localhost", "::1"})
FIRST_PORT = 50051
PORTS_PER_REPLICA = 100
LAST_PORT = 65535


def default_port(stage_index: int, replica: int = 0) -> int:
    """Return the port that a stage's server listens on by default."""
    port = FIRST_PORT + stage_index + PORTS_PER_REPLICA * replica
    if port > LAST_PORT:
        raise ConfigError(
            f"stage {stage_index} replica {replica} has no default port: give HOST:PORT"
        )
    return port


def with_port(address: str, stage_index: int, replica: int = 0) -> str:
    """Return `address`, with the default port of a stage's replica if it has no port."""
    is_bare = ":" not in address or address.endswith("]")
    return f"{address}:{default_port(stage_index, replica)}" if is_bare else address


def with_defaults(address: str) -> str:
    """Return HOST:PORT for an address in which the host, the port or both may be missing."""
    if not address.strip(":"):
        return f"{LOOPBACK}:{FIRST_PORT}"
    if address.removeprefix(":").isdecimal():
        return f"{LOOPBACK}:{address.removeprefix(':')}"
    return with_port(address, 0)


def parse(address: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT" or "[IPV6]:PORT"; raises ConfigError for others."""
    host, _, port = address.rpartition(":")
    is_ipv6 = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_ipv6 else host
    odd = any(character.isspace() or character in "[]" for character in host)
    is_port = port.isdecimal() and len(port) <= len(str(LAST_PORT)) and int(port) <= LAST_PORT
    if not host or odd or not is_port:
        raise ConfigError(f"{address!r} is not HOST:PORT, such as {LOOPBACK}:{FIRST_PORT}")
    if is_ipv6 != (":" in host):
        raise ConfigError(
            f"{address!r}: an IPv6 address has brackets, and no other: [::1]:{FIRST_PORT}"
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_own_name(host_header: str, host: str) -> bool:
    """Return whether a request on loopback names this server, as browsers' requests have to.

    Otherwise a page whose own name resolves to loopback would have the same origin (DNS rebinding).

    Args:
        host_header: the request's. Its port is ignored, since a forwarded one differs.
    """
    try:
        name = urlsplit(f"//{host_header}").hostname
    except ValueError:
        return False
    return name is not None and name in LOOPBACK_NAMES | {host.lower()}
