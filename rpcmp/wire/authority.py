"""A private certificate authority, for those who have none: a key and a certificate in a folder.

    DIR/ca.crt, ca.key                     the authority; its key never leaves this folder
    DIR/stage1/ca.crt, tls.crt, tls.key    what stage 1's host gets

Elliptic curve P-256 throughout: every TLS library has it, and a handshake takes well under a
millisecond of it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rpcmp.errors import SecurityError
from rpcmp.wire.credentials import CA, CERTIFICATE, KEY, require_private
from rpcmp.wire.role import Role

CA_KEY = "ca.key"
CA_DAYS = 3650
SKEW = timedelta(minutes=5)
"""What hosts' clocks may differ by: a fresh certificate is valid from so long ago."""


def create(folder: Path) -> None:
    """Make a certificate authority in `folder`.

    Raises:
        SecurityError: there is one, or the folder cannot be written.
    """
    if (folder / CA_KEY).exists():
        raise SecurityError(
            f"{folder} has a certificate authority: to replace it would make all of its "
            "certificates worthless. Choose another folder, or remove this one"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rpcmp private CA")])
    builder = (
        _builder(name, key, CA_DAYS)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    certificate = builder.sign(key, hashes.SHA256())
    _write(folder / CA_KEY, _pem(key), 0o600)
    _write(folder / CA, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def issue(
    folder: Path,
    name: str,
    role: Role,
    hosts: Sequence[str],
    days: int,
    begin: datetime | None = None,
) -> Path:
    """Issue a certificate, or renew one: servers that use it take up the new files by themselves.

    Args:
        folder: of the authority.
        name: of the folder in it that gets ca.crt, tls.crt and tls.key.
        role: what its holder may be.
        hosts: names and IP addresses that a server is reached at.
        days: how long it is valid.
        begin: from when on; None: now.

    Returns:
        that folder.

    Raises:
        SecurityError: there is no authority, or a host is no name.
    """
    ca_key, ca = _load(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = [x509.UniformResourceIdentifier(role.uri), *map(_host, hosts)]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(subject, key, days, begin)
        .issuer_name(ca.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    certificate = builder.sign(ca_key, hashes.SHA256())
    issued = folder / name
    _write(issued / KEY, _pem(key), 0o600)
    _write(issued / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(issued / CA, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    return issued


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, begin: datetime | None = None
) -> x509.CertificateBuilder:
    now = begin or datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    try:
        return x509.DNSName(host.encode("idna").decode())
    except (ValueError, UnicodeError) as error:
        raise SecurityError(f"--host {host!r} is neither a host name nor an IP address") from error


def _load(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        require_private(folder / CA_KEY)
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    except FileNotFoundError as error:
        raise SecurityError(
            f"{error.filename} is missing: `rpcmp certs init {folder}` makes an authority"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise SecurityError(f"the authority in {folder} cannot be used: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SecurityError(f"{folder / CA_KEY} is no elliptic curve key, so not one of ours")
    return key, certificate


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Put a file in its place as a whole, with its mode from the first byte on.

    Raises:
        SecurityError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        new.rename(path)
    except OSError as error:
        raise SecurityError(f"cannot write {path}: {error.strerror or error}") from error
