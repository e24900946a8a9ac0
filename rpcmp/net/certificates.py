"""What a certificate file says, for people and for checks before anything is sent.

The record of an authority: each certificate that it has issued, so that it can be revoked.

DIR/issued.txt     SERIAL NAME EXPIRY, one line each; the serial in hexadecimal, the expiry UTC

Writing files that a crash or another process must not find half written.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

from cryptography import x509

from rpcmp.errors import SecurityError
from rpcmp.net import name_constraints
from rpcmp.net.identity import CA, CERTIFICATE, Role, find


def write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file as a whole, with its mode from the first byte on.

    A file that is there keeps its owner, and its mode as far as `mode` and reading by its group
    allow: certificates of containers belong to the image's group.

    Raises:
        SecurityError: the file cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            _inherit(file.fileno(), path, mode)
            file.write(content)
        new.rename(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def append(path: Path, line: str) -> None:
    """Add one line to a file for its owner alone, on the disk when this returns.

    Raises:
        SecurityError: the file cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(f"{line}\n".encode())
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritable(path, error) from error


def _inherit(descriptor: int, path: Path, mode: int) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):
        found = path.stat()
        os.fchown(descriptor, found.st_uid, found.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & (mode | stat.S_IRGRP))


def _unwritable(path: Path, error: OSError) -> SecurityError:
    return SecurityError(f"cannot write {path}: {error.strerror or error}")


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
        """That of a folder of `rpcmp.net.identity`.

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
            find(names.get_values_for_type(x509.UniformResourceIdentifier)),
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
    permitted = name_constraints.of(found)
    names = (
        "any host"
        if permitted is None
        else name_constraints.text_of(permitted) or "this machine only"
    )
    return f"its authority for {names}, until {found.not_valid_after_utc:%Y-%m-%d}"


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
