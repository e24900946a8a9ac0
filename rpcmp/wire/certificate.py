"""What a certificate file says, for people and for checks before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from cryptography import x509

from rpcmp.errors import SecurityError
from rpcmp.wire import permits, role
from rpcmp.wire.credentials import CA, CERTIFICATE
from rpcmp.wire.role import Role


@dataclass(frozen=True)
class Certificate:
    """A certificate.

    Attributes:
        path: its file.
        role: what its holder may be; None: nothing.
        hosts: names and IP addresses that it is for.
        not_before, not_after: when it is valid, UTC.
    """

    path: Path
    role: Role | None
    hosts: list[str]
    not_before: datetime
    not_after: datetime

    @classmethod
    def load(cls, folder: Path) -> Self:
        """That of a folder of `rpcmp.wire.credentials`.

        Raises:
            SecurityError: it cannot be read.
        """
        path = folder / CERTIFICATE
        try:
            found = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            raise SecurityError(f"{path} is no certificate that can be read: {error}") from error
        try:
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            names = x509.SubjectAlternativeName([])
        hosts = [
            *names.get_values_for_type(x509.DNSName),
            *map(str, names.get_values_for_type(x509.IPAddress)),
        ]
        return cls(
            path,
            role.find(names.get_values_for_type(x509.UniformResourceIdentifier)),
            hosts,
            found.not_valid_before_utc,
            found.not_valid_after_utc,
        )


def authority_text(folder: Path) -> str:
    """Return which names the authority in a folder may certify, and until when, for people.

    Raises:
        SecurityError: its certificate cannot be read.
    """
    path = folder / CA
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SecurityError(f"{path} is no certificate that can be read: {error}") from error
    permitted = permits.of(found)
    names = "any host" if permitted is None else permits.text_of(permitted) or "this machine only"
    return f"its authority for {names}, until {found.not_valid_after_utc:%Y-%m-%d}"
