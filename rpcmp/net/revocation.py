"""Revoked certificates: the CRL beside a host's certificate, if there is one."""

from __future__ import annotations

import re
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from rpcmp.errors import SecurityError

_ONE = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


class Revocations:
    """CRLs of one PEM file, each verified with the authorities' certificates.

    Args:
        content: of the file.
        authorities: certificates, PEM.
        path: of the file, for messages.

    Raises:
        SecurityError: the content is not a CRL, or none of the authorities has signed it.
    """

    def __init__(self, content: bytes, authorities: bytes, path: Path) -> None:
        self._content = content
        try:
            self._lists = [x509.load_pem_x509_crl(one) for one in _ONE.findall(content)]
            known = x509.load_pem_x509_certificates(authorities)
            is_signed = all(any(_has_signed(ca, crl) for ca in known) for crl in self._lists)
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
        """The number of revoked certificates."""
        return sum(map(len, self._lists))

    def has(self, certificate: bytes) -> bool:
        """Return whether a certificate, in DER, is revoked."""
        found = x509.load_der_x509_certificate(certificate)
        return any(
            crl.issuer == found.issuer
            and crl.get_revoked_certificate_by_serial_number(found.serial_number) is not None
            for crl in self._lists
        )

    def require(self, context: ssl.SSLContext) -> None:
        """Make `context` refuse revoked certificates, and those of authorities without a CRL."""
        # Python takes CRLs from files only; the content that was checked is not read anew.
        with tempfile.NamedTemporaryFile(prefix="rpcmp-crl-") as file:
            file.write(self._content)
            file.flush()
            context.load_verify_locations(file.name)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _has_signed(authority: x509.Certificate, crl: x509.CertificateRevocationList) -> bool:
    key = authority.public_key()
    return authority.subject == crl.issuer and crl.is_signature_valid(key)  # type: ignore[arg-type]
