"""Signatures of a driver on what other hosts keep for the driver that comes after it.

    driver ──record, signed with tls.key──> stage servers ──as it is──> the next driver

A server that holds a job's record is no authority on it: whoever holds a stage's certificate could
tell of a job that never was, or that it had ended. So a record counts only with the signature of a
certificate for `rpcmp://driver`, of one of our authorities, valid and not revoked.

Imports cryptography.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa

from rpcmp.errors import SecurityError
from rpcmp.net.certificates import Revocations, read_certificate, role_of
from rpcmp.net.identity import CA, CERTIFICATE, KEY

Statement = Sequence[str | int]
"""What is signed: first what kind of statement it is, then its parts."""


class Signature(NamedTuple):
    """A signature, with the certificate of who has signed, in DER."""

    certificate: bytes
    value: bytes


class Signer:
    """Signs with the key of a certificate's folder."""

    def __init__(self, folder: Path) -> None:
        certificate = read_certificate(folder / CERTIFICATE)
        self.certificate = certificate.public_bytes(serialization.Encoding.DER)
        try:
            key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise SecurityError(f"{folder / KEY} cannot be used: {error}") from error
        if key.public_key() != certificate.public_key():
            raise SecurityError(f"{KEY} and {CERTIFICATE} in {folder} do not belong together")
        self._key = key

    def sign(self, statement: Statement) -> Signature:
        data = _bytes_of(statement)
        match self._key:
            case ec.EllipticCurvePrivateKey():
                value = self._key.sign(data, ec.ECDSA(hashes.SHA256()))
            case rsa.RSAPrivateKey():
                value = self._key.sign(data, padding.PKCS1v15(), hashes.SHA256())
            case ed25519.Ed25519PrivateKey():
                value = self._key.sign(data)
            case _:
                raise SecurityError(
                    f"{CERTIFICATE} of a driver has a key of another kind than EC, RSA and Ed25519"
                )
        return Signature(self.certificate, value)


class Verifier:
    """Verifies signatures of drivers.

    Args:
        authorities: the content of ca.crt.
        revocations: by these; None if there are none.
    """

    def __init__(self, authorities: bytes, revocations: Revocations | None) -> None:
        try:
            self._authorities = x509.load_pem_x509_certificates(authorities)
        except ValueError as error:
            raise SecurityError(f"{CA} cannot be used: {error}") from error
        self._revocations = revocations

    def require_signed(self, statement: Statement, signature: Signature) -> None:
        """Check that a driver has signed a statement.

        Raises:
            SecurityError: nobody has, or somebody else.
        """
        if not signature.value:
            raise SecurityError("no driver has signed it")
        try:
            certificate = x509.load_der_x509_certificate(signature.certificate)
            _require_value(certificate, _bytes_of(statement), signature.value)
            issuers = [each for each in self._authorities if has_issued(each, certificate)]
            role = role_of(certificate)
        except InvalidSignature:
            raise SecurityError("its signature is of something else") from None
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise SecurityError(f"its signature cannot be read: {error}") from error
        if not issuers:
            raise SecurityError("who has signed it has no certificate of an authority in ca.crt")
        if role is None or not role.is_driver:
            raise SecurityError(f"it is signed by {role or 'somebody'}, and not by a driver")
        if not (_is_valid(certificate) and any(map(_is_valid, issuers))):
            raise SecurityError("the driver's certificate that has signed it has expired")
        if self._revocations is None:
            return
        if not self._revocations.knows(issuers):  # as TLS has it
            raise SecurityError("ca.crl has no list of the authority of who has signed it")
        if self._revocations.has(signature.certificate):
            raise SecurityError("the driver's certificate that has signed it is revoked")


def _bytes_of(statement: Statement) -> bytes:
    return json.dumps(["rpcmp", *statement]).encode()


def has_left(certificate: bytes, before: bytes, now: bytes) -> bool:
    """Whether a certificate, in DER, is of an authority that was in ca.crt and is not any more.

    Args:
        before, now: contents of ca.crt.
    """
    held = x509.load_der_x509_certificate(certificate)
    was, is_issued = (
        any(has_issued(each, held) for each in x509.load_pem_x509_certificates(content))
        for content in (before, now)
    )
    return was and not is_issued


def _is_valid(certificate: x509.Certificate) -> bool:
    now = datetime.now(UTC)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def has_issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether a certificate has the signature of an authority."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _require_value(certificate: x509.Certificate, data: bytes, value: bytes) -> None:
    match certificate.public_key():
        case ec.EllipticCurvePublicKey() as key:
            key.verify(value, data, ec.ECDSA(hashes.SHA256()))
        case rsa.RSAPublicKey() as key:
            key.verify(value, data, padding.PKCS1v15(), hashes.SHA256())
        case ed25519.Ed25519PublicKey() as key:
            key.verify(value, data)
        case _:
            raise TypeError("a key of another kind")
