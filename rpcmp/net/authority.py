"""A private certificate authority: a key and a certificate in a folder.

    DIR/ca.crt, ca.key                     the authority; its key never leaves this folder
    DIR/issued.txt                         its record, see `rpcmp.net.certificates`
    DIR/ca.crl                             revoked certificates, if there are any
    DIR/stage1/ca.crt, tls.crt, tls.key    the files for stage 1's host, and ca.crl if it exists

All keys are on the elliptic curve P-256: every TLS library has it, and it takes well under a
millisecond of a handshake.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rpcmp.errors import SecurityError
from rpcmp.net import certificates
from rpcmp.net.certificates import Issued, write_file
from rpcmp.net.identity import CA, CERTIFICATE, CRL, KEY, Role, require_private

CA_KEY = "ca.key"
CA_DAYS = 730
SKEW = timedelta(days=1)
"""Greatest difference of hosts' clocks, as of one that was set to a local time: fresh certificates
are valid from so long ago."""
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Expiry of CRLs. They are copied by hand, and a forgotten copy must not stop runs."""

PEM = serialization.Encoding.PEM


class Authority:
    def __init__(
        self, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
    ) -> None:
        self.folder = folder
        self.certificate = certificate
        self._key = key

    @classmethod
    def load(cls, folder: Path) -> Authority:
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
        return cls(folder, key, certificate)

    @property
    def permitted(self) -> list[x509.GeneralName] | None:
        """Names that it may certify; None: all, as in authorities of rpcmp 0.1.0."""
        return certificates.permitted_names(self.certificate)

    @property
    def not_after(self) -> datetime:
        return self.certificate.not_valid_after_utc

    @property
    def is_aged(self) -> bool:
        """Whether less than half of its validity is left."""
        begin = self.certificate.not_valid_before_utc
        return datetime.now(UTC) > begin + (self.not_after - begin) / 2

    @property
    def issued(self) -> list[Path]:
        """The folders that it has issued certificates into."""
        return sorted(path.parent for path in self.folder.glob(f"*/{CERTIFICATE}"))

    def sign(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        ours = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.issuer_name(self.certificate.subject)
        return builder.add_extension(ours, critical=False).sign(self._key, hashes.SHA256())

    def renew(self, days: int, permitted: Sequence[x509.GeneralName] | None) -> None:
        """Renew its certificate, with the same key and name, in every folder that it has issued."""
        self.certificate = _own(self._key, self.certificate.subject, days, permitted)
        for folder in (self.folder, *self.issued):
            write_file(folder / CA, self.certificate.public_bytes(PEM), 0o644)

    def write_crl(self, entries: Iterable[x509.RevokedCertificate], number: int) -> None:
        """Write a CRL into every folder that it has issued."""
        ours = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(datetime.now(UTC) - SKEW)
            .next_update(NEVER)
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(ours, critical=False)
        )
        for entry in entries:
            builder = builder.add_revoked_certificate(entry)
        content = builder.sign(self._key, hashes.SHA256()).public_bytes(PEM)
        for folder in (self.folder, *self.issued):
            write_file(folder / CRL, content, 0o644)

    def revoked(self) -> list[x509.CertificateRevocationList]:
        """Return its CRL; empty if it has revoked nothing."""
        path = self.folder / CRL
        try:
            crl = x509.load_pem_x509_crl(path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise SecurityError(
                f"{path} cannot be used: {error}; copy the newest ca.crl of an issued folder or of "
                "a host there, or what it revokes is valid again"
            ) from error
        if not crl.is_signature_valid(self._key.public_key()):
            raise SecurityError(f"{path} is another authority's")
        return [crl]


def create(
    folder: Path, hosts: Sequence[str] = (), permit: Sequence[str] = (), days: int = CA_DAYS
) -> None:
    """Create a certificate authority in `folder`, for names around `hosts` only.

    Each host permits its domain or private network; `permit` adds domains, hosts, addresses and
    networks.
    """
    if (folder / CA_KEY).exists():
        raise SecurityError(
            f"{folder} has a certificate authority: to replace it would make all of its "
            "certificates worthless. Choose another folder, or remove this one"
        )
    permitted = [*certificates.ALWAYS_PERMITTED]
    for subtree in (
        *map(certificates.parse_permit, permit),
        *map(certificates.subtree_around, hosts),
    ):
        if not certificates.is_permitted(subtree, permitted):
            permitted.append(subtree)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rpcmp private CA")])
    certificate = _own(key, name, days, permitted)
    write_file(folder / CA_KEY, _pem(key), 0o600)
    write_file(folder / CA, certificate.public_bytes(PEM), 0o644)


def permit(folder: Path, hosts: Sequence[str]) -> bool:
    """Permit an authority to certify `hosts`; return whether that changes its ca.crt.

    Other hosts accept the new names once they have that file.
    """
    authority = Authority.load(folder)
    permitted = authority.permitted
    if permitted is None:
        return False
    more = [
        certificates.subtree_around(host)
        for host in hosts
        if not certificates.is_permitted(certificates.general_name(host), permitted)
    ]
    if more:
        begin = authority.certificate.not_valid_before_utc
        authority.renew((authority.not_after - begin).days, [*permitted, *dict.fromkeys(more)])
    return bool(more)


def renew(folder: Path) -> bool:
    """Renew an authority if less than half of its validity is left; return whether it was."""
    authority = Authority.load(folder)
    if authority.is_aged:
        authority.renew(CA_DAYS, authority.permitted)
        return True
    return False


def issue(
    folder: Path,
    name: str,
    role: Role,
    hosts: Sequence[str],
    days: int,
    begin: datetime | None = None,
) -> Path:
    """Issue or renew a certificate; servers that use it load the new files by themselves.

    If the authority in `folder` may not certify the hosts yet, it is extended. The certificate is
    valid from `begin` on, by default from now. Returns its folder.
    """
    names = [x509.UniformResourceIdentifier(role.uri), *map(certificates.general_name, hosts)]
    permit(folder, hosts)
    authority = Authority.load(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    # Certificates without DNS names have a common name, which must not be taken for one: hence
    # the space.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"rpcmp {name}")])
    builder = (
        _builder(subject, key, days, begin)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
    )
    certificate = authority.sign(builder)
    if certificate.not_valid_after_utc > authority.not_after:
        raise SecurityError(
            f"the authority in {folder} expires on {authority.not_after:%Y-%m-%d}, before a "
            f"certificate of {days} days: give fewer --days, or `rpcmp certs renew {folder}`"
        )
    crl = authority.revoked()
    # Recorded before it is written: any certificate in use can be revoked.
    _adopt(authority, name)
    certificates.add_issued(folder, Issued.from_certificate(certificate, name))
    issued = folder / name
    write_file(issued / KEY, _pem(key), 0o600)
    write_file(issued / CERTIFICATE, certificate.public_bytes(PEM), 0o644)
    write_file(issued / CA, authority.certificate.public_bytes(PEM), 0o644)
    for one in crl:
        write_file(issued / CRL, one.public_bytes(PEM), 0o644)
    return issued


def revoke(folder: Path, name: str) -> int:
    """Revoke every valid certificate that was issued under `name`; return how many.

    They are added to DIR/ca.crl and its copies.
    """
    authority = Authority.load(folder)
    _adopt(authority, name)
    crls, now = authority.revoked(), datetime.now(UTC)
    entries = {entry.serial_number: entry for crl in crls for entry in crl}
    serials = {
        issued.serial
        for issued in certificates.read_issued(folder)
        if issued.name == name and issued.not_after > now and issued.serial not in entries
    }
    if not serials:
        raise SecurityError(
            f"{folder} has issued nothing under the name {name!r} that is valid, so there is "
            "nothing to revoke"
        )
    for serial in serials:
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        entries[serial] = entry.build()
    numbers = [crl.extensions.get_extension_for_class(x509.CRLNumber).value for crl in crls]
    last = max((number.crl_number for number in numbers), default=0)
    authority.write_crl(entries.values(), last + 1)
    return len(serials)


def is_revoked(folder: Path, name: str) -> bool:
    authority = Authority.load(folder)
    serial = certificates.read_certificate(folder / name / CERTIFICATE).serial_number
    return any(crl.get_revoked_certificate_by_serial_number(serial) for crl in authority.revoked())


def _adopt(authority: Authority, name: str) -> None:
    """Record the certificate in DIR/NAME if rpcmp 0.1.0 has issued it, which kept no record."""
    try:
        content = (authority.folder / name / CERTIFICATE).read_bytes()
        issued = Issued.from_certificate(x509.load_pem_x509_certificate(content), name)
    except (FileNotFoundError, ValueError):  # none, or a broken one that issuing mends
        return
    if issued.serial not in {one.serial for one in certificates.read_issued(authority.folder)}:
        certificates.add_issued(authority.folder, issued)


def _own(
    key: ec.EllipticCurvePrivateKey,
    name: x509.Name,
    days: int,
    permitted: Sequence[x509.GeneralName] | None,
) -> x509.Certificate:
    """Return an authority's self-signed certificate."""
    builder = (
        _builder(name, key, days)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    if permitted is not None:
        builder = builder.add_extension(x509.NameConstraints(permitted, None), critical=True)
    return builder.sign(key, hashes.SHA256())


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


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
