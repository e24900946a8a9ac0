"""The record of an authority: each certificate that it has issued, so that it can be revoked.

DIR/issued.txt     SERIAL NAME EXPIRY, one line each; the serial in hexadecimal, the expiry UTC
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509

from rpcmp.errors import SecurityError
from rpcmp.wire.safefile import append

RECORD = "issued.txt"


class Issued(NamedTuple):
    """One certificate.

    Attributes:
        serial: its serial number.
        name: of the folder that it was issued into.
        not_after: its expiry, UTC.
    """

    serial: int
    name: str
    not_after: datetime

    @classmethod
    def of(cls, certificate: x509.Certificate, name: str) -> Self:
        """Return what is recorded of a certificate."""
        return cls(certificate.serial_number, name, certificate.not_valid_after_utc)


def read(folder: Path) -> list[Issued]:
    """Return all that the authority in `folder` has issued; nothing if it keeps no record.

    Raises:
        SecurityError: the record cannot be read.
    """
    path = folder / RECORD
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise SecurityError(f"{path} cannot be read: {error}") from error
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1)]


def add(folder: Path, issued: Issued) -> None:
    """Record a certificate.

    Raises:
        SecurityError: the record cannot be written.
    """
    append(folder / RECORD, f"{issued.serial:x} {issued.name} {issued.not_after:%Y-%m-%dT%H:%M:%S}")


def _parsed(path: Path, number: int, line: str) -> Issued:
    try:
        serial, name, expiry = line.split()
        return Issued(int(serial, 16), name, datetime.fromisoformat(expiry).replace(tzinfo=UTC))
    except ValueError as error:
        raise SecurityError(
            f"line {number} of {path} is not SERIAL NAME EXPIRY: {line!r}; mend it, or what it "
            "recorded cannot be revoked"
        ) from error
