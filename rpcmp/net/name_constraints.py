"""Names that an authority may certify: the permitted subtrees of its name constraints (RFC 5280).

A browser that trusts the authority, for the page of `rpcmp drive --ui`, trusts it for these names
only, whatever is signed with its key.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable, Sequence

from cryptography import x509

from rpcmp.errors import SecurityError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PRIVATE: Sequence[Network] = [
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
]
"""Networks that no website is in; an address of one permits all of it."""

ALWAYS: Sequence[x509.GeneralName] = [
    *(x509.UniformResourceIdentifier(kind) for kind in ("stage", "spare", "driver")),
    x509.DNSName("localhost"),
    x509.IPAddress(ipaddress.ip_network("127.0.0.0/8")),
    x509.IPAddress(ipaddress.ip_network("::1/128")),
]
"""Permitted in any case. The hosts of URIs are the roles'; that a kind of name is in the list is
also what forbids all others of that kind."""

SUFFIX_LETTERS = 3
"""Letters up to which the second label from the end may be part of a public suffix, as in co.uk."""


def name_of(host: str, option: str = "--host") -> x509.GeneralName:
    """Return a host's name or IP address as certificates have it.

    Raises:
        SecurityError: it is neither.
    """
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    try:
        return x509.DNSName(host.encode("idna").decode().lower())
    except (ValueError, UnicodeError) as error:
        raise SecurityError(
            f"{option} {host!r} is neither a host name nor an IP address"
        ) from error


def asked(permit: str) -> x509.GeneralName:
    """Return the subtree that `--permit` names: a domain, a host, an address or a network.

    Raises:
        SecurityError: it is none of these.
    """
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_network(permit.strip("[]")))
    if not permit.strip("."):
        raise SecurityError(f"--permit {permit!r} names no domain")
    return name_of(permit.removeprefix("*").removeprefix("."), "--permit")


def around(host: str) -> x509.GeneralName:
    """Return the subtree that a host permits: its domain or private network, or itself alone.

    Raises:
        SecurityError: the host is neither a host name nor an IP address.
    """
    name = name_of(host)
    if isinstance(name, x509.IPAddress):
        alone = ipaddress.ip_network(name.value)
        return x509.IPAddress(next((net for net in PRIVATE if _is_in(alone, net)), alone))
    _, _, domain = name.value.partition(".")
    if name.value.startswith("*.") or _is_own(domain):
        return x509.DNSName(domain)
    return name


def _is_own(domain: str) -> bool:
    """Return whether a domain is more than a suffix under which anyone may register a name."""
    *rest, label, _ = ["", *domain.split(".")]
    return len(rest) > 1 or (len(rest) == 1 and len(label) > SUFFIX_LETTERS)


def is_permitted(name: x509.GeneralName, subtrees: Iterable[x509.GeneralName]) -> bool:
    """Return whether a subtree covers a name, or another subtree."""
    return any(_covers(subtree, name) for subtree in subtrees)


def of(authority: x509.Certificate) -> list[x509.GeneralName] | None:
    """Return what an authority's certificate permits; None: all names, as rpcmp 0.1.0 made it."""
    try:
        found = authority.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:
        return None
    return list(found.permitted_subtrees or [])


def text_of(subtrees: Iterable[x509.GeneralName]) -> str:
    """Return hosts, domains and networks for people, without those that are always permitted."""
    return ", ".join(str(subtree.value) for subtree in subtrees if subtree not in ALWAYS)


def _covers(subtree: x509.GeneralName, name: x509.GeneralName) -> bool:
    if isinstance(subtree, x509.DNSName) and isinstance(name, x509.DNSName):
        return f".{name.value}".endswith(f".{subtree.value}")
    if isinstance(subtree, x509.IPAddress) and isinstance(name, x509.IPAddress):
        return _is_in(ipaddress.ip_network(name.value), ipaddress.ip_network(subtree.value))
    return False


def _is_in(small: Network, large: Network) -> bool:
    if isinstance(small, ipaddress.IPv4Network):
        return isinstance(large, ipaddress.IPv4Network) and small.subnet_of(large)
    return isinstance(large, ipaddress.IPv6Network) and small.subnet_of(large)
