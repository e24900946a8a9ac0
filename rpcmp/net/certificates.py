"""Certificates as files: what they contain, which names an authority permits, what is revoked.

DIR/issued.txt     SERIAL NAME EXPIRY, one line per certificate that the authority has issued,
                   so that it can be revoked; serial in hexadecimal, expiry in UTC
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import ssl
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from rpcmp.errors import SecurityError
from rpcmp.net.identity import CA, CERTIFICATE, Role, find

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PRIVATE_NETWORKS: Sequence[Network] = [
    ipaddress.ip_network(network)
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
]
"""Networks that no website is in; an address of one permits all of it."""

ALWAYS_PERMITTED: Sequence[x509.GeneralName] = [
    *(x509.UniformResourceIdentifier(kind) for kind in ("stage", "spare", "driver")),
    x509.DNSName("localhost"),
    x509.IPAddress(ipaddress.ip_network("127.0.0.0/8")),
    x509.IPAddress(ipaddress.ip_network("::1/128")),
]
"""Permitted by every authority. The hosts of URIs are the roles. A kind of name in this list also
forbids all other names of that kind."""

SUFFIX_LETTERS = 3
"""Letters up to which the second label from the end may be part of a public suffix, as in co.uk."""


def general_name(host: str, option: str = "--host") -> x509.GeneralName:
    """Return a host's name or IP address as certificates have it."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    try:
        return x509.DNSName(host.encode("idna").decode().lower())
    except (ValueError, UnicodeError) as error:
        raise SecurityError(
            f"{option} {host!r} is neither a host name nor an IP address"
        ) from error


def parse_permit(permit: str) -> x509.GeneralName:
    """Return the subtree that `--permit` names: a domain, a host, an address or a network."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_network(permit.strip("[]")))
    if not permit.strip("."):
        raise SecurityError(f"--permit {permit!r} names no domain")
    return general_name(permit.removeprefix("*").removeprefix("."), "--permit")


def subtree_around(host: str) -> x509.GeneralName:
    """Return the subtree that a host permits: its domain or private network, or itself alone."""
    name = general_name(host)
    if isinstance(name, x509.IPAddress):
        alone = ipaddress.ip_network(name.value)
        return x509.IPAddress(next((net for net in PRIVATE_NETWORKS if _is_in(alone, net)), alone))
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


def permitted_names(authority: x509.Certificate) -> list[x509.GeneralName] | None:
    """Return the names that an authority permits; None: all, as in authorities of rpcmp 0.1.0."""
    try:
        constraints = authority.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:
        return None
    return list(constraints.permitted_subtrees or [])


def _covers(subtree: x509.GeneralName, name: x509.GeneralName) -> bool:
    if isinstance(subtree, x509.DNSName) and isinstance(name, x509.DNSName):
        return f".{name.value}".endswith(f".{subtree.value}")
    if isinstance(subtree, x509.IPAddress) and isinstance(name, x509.IPAddress):
        return _is_in(ipaddress.ip_network(name.value), ipaddress.ip_network(subtree.value))
    return False


def _is_in(small: Network, large: Network) -> bool:
    return small.version == large.version and small.subnet_of(large)  # type: ignore[arg-type]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SecurityError(f"cannot write {path}: {error.strerror or error}") from error


def write_file(path: Path, content: bytes, mode: int) -> None:
    """Replace a file atomically; it has its mode from the first byte on.

    An existing file keeps its owner, and its mode as far as `mode` and reading by its group allow:
    certificates of containers belong to the image's group.
    """
    new = path.with_name(f".{path.name}.new")
    with _writing(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                old = path.stat()
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode) & (mode | stat.S_IRGRP))
            file.write(content)
        new.rename(path)


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SecurityError(f"{path} is no certificate that can be read: {error}") from error


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def role_of(certificate: x509.Certificate) -> Role | None:
    """Return the role of a certificate's holder; None if it has not exactly one."""
    names = _alternative_names(certificate)
    return find(names.get_values_for_type(x509.UniformResourceIdentifier))


@dataclass(frozen=True)
class Certificate:
    """A host's certificate: the holder's role, if it has one, names and addresses, and validity."""

    path: Path
    role: Role | None
    hosts: list[str]
    not_before: datetime
    not_after: datetime

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / CERTIFICATE
        certificate = read_certificate(path)
        names = _alternative_names(certificate)
        hosts = [
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        ]
        return cls(
            path,
            role_of(certificate),
            hosts,
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
        )


def authority_text(folder: Path) -> str:
    """Describe the names that the authority in a folder may certify, and its expiry."""
    authority = read_certificate(folder / CA)
    permitted = permitted_names(authority)
    names = "any host"
    if permitted is not None:
        added = [str(name.value) for name in permitted if name not in ALWAYS_PERMITTED]
        names = ", ".join(added) or "this machine only"
    return f"its authority for {names}, until {authority.not_valid_after_utc:%Y-%m-%d}"


RECORD = "issued.txt"


class Issued(NamedTuple):
    """A line of the record: `name` is of the folder that a certificate was issued into."""

    serial: int
    name: str
    not_after: datetime

    @classmethod
    def from_certificate(cls, certificate: x509.Certificate, name: str) -> Self:
        return cls(certificate.serial_number, name, certificate.not_valid_after_utc)


def read_issued(folder: Path) -> list[Issued]:
    """Return the record of the authority in `folder`; empty if it keeps none."""
    path = folder / RECORD
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise SecurityError(f"{path} cannot be read: {error}") from error
    return [_parse_issued(path, number, line) for number, line in enumerate(lines, 1)]


def add_issued(folder: Path, issued: Issued) -> None:
    """Record a certificate, on the disk for good."""
    path = folder / RECORD
    line = f"{issued.serial:x} {issued.name} {issued.not_after:%Y-%m-%dT%H:%M:%S}\n"
    with _writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())


def _parse_issued(path: Path, number: int, line: str) -> Issued:
    try:
        serial, name, expiry = line.split()
        return Issued(int(serial, 16), name, datetime.fromisoformat(expiry).replace(tzinfo=UTC))
    except ValueError as error:
        raise SecurityError(
            f"line {number} of {path} is not SERIAL NAME EXPIRY: {line!r}; mend it, or what it "
            "recorded cannot be revoked"
        ) from error


_CRL = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


class Revocations:
    """CRLs of one PEM file, each verified with the authorities' certificates, also PEM."""

    def __init__(self, content: bytes, authorities: bytes, path: Path) -> None:
        self._content = content
        try:
            self._lists = [x509.load_pem_x509_crl(crl) for crl in _CRL.findall(content)]
            cas = x509.load_pem_x509_certificates(authorities)
            is_signed = all(any(_has_signed(ca, crl) for ca in cas) for crl in self._lists)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise SecurityError(f"{path} cannot be used: {error}") from error
        if not self._lists:
            raise SecurityError(f"{path} is no CRL in PEM: copy it again from the authority's host")
        if not is_signed:
            raise SecurityError(
                f"{path} is not signed by an authority in ca.crt: copy both from the same authority"
            )

    @property
    def number(self) -> int:
        return sum(map(len, self._lists))

    def knows(self, authorities: Iterable[x509.Certificate]) -> bool:
        """Return whether there is a list of one of these authorities."""
        return any(_has_signed(each, crl) for each in authorities for crl in self._lists)

    def is_older_than(self, other: Revocations) -> bool:
        """Return whether a list of an authority was made before the one that `other` has."""
        return any(
            ours.issuer == theirs.issuer and ours.last_update_utc < theirs.last_update_utc
            for ours in self._lists
            for theirs in other._lists
        )

    def has(self, certificate: bytes) -> bool:
        """Return whether a certificate, in DER, is revoked."""
        held = x509.load_der_x509_certificate(certificate)
        return any(
            crl.issuer == held.issuer
            and crl.get_revoked_certificate_by_serial_number(held.serial_number) is not None
            for crl in self._lists
        )

    def require(self, context: ssl.SSLContext) -> None:
        """Make `context` refuse revoked certificates, and all from authorities without a CRL."""
        # Python takes CRLs from files only; the content that was checked is not read anew.
        with tempfile.NamedTemporaryFile(prefix="rpcmp-crl-") as file:
            file.write(self._content)
            file.flush()
            context.load_verify_locations(file.name)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _has_signed(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    key = authority.public_key()
    return authority.subject == crl.issuer and crl.is_signature_valid(key)  # type: ignore[arg-type]
