"""A driver's signatures: whose count, and of what."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

from rpcmp.errors import SecurityError
from rpcmp.net import signatures
from rpcmp.net.authority import Authority
from rpcmp.net.certificates import Revocations
from rpcmp.net.signatures import Signature, Signer, Verifier
from tests.support.lan import cli, issue

STATEMENT = ("about", "job", 3)


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    return issue(tmp_path / "certs", "127.0.0.1")


def verifier(folder: Path, revocations: Revocations | None) -> Verifier:
    return Verifier((folder / "ca.crt").read_bytes(), revocations)


def test_a_drivers_signature_is_of_its_statement(certs: Path) -> None:
    signature = Signer(certs / "driver").sign(STATEMENT)
    verifies = verifier(certs, None)
    verifies.require_signed(STATEMENT, signature)
    for other in (("about", "job", 4), ("about", "job"), ("about", "job", "3"), ("aboutjob", 3)):
        with pytest.raises(SecurityError, match="its signature is of something else"):
            verifies.require_signed(other, signature)
    with pytest.raises(SecurityError, match="no driver has signed it"):
        verifies.require_signed(STATEMENT, Signature(signature.certificate, b""))
    for certificate in (b"", b"x" * 10_000):
        with pytest.raises(SecurityError, match="its signature cannot be read"):
            verifies.require_signed(STATEMENT, Signature(certificate, signature.value))


def test_a_stage_is_no_driver(certs: Path) -> None:
    signature = Signer(certs / "stage0").sign(STATEMENT)
    with pytest.raises(SecurityError, match="it is signed by stage 0, and not by a driver"):
        verifier(certs, None).require_signed(STATEMENT, signature)


def test_another_authority_has_issued_nothing(certs: Path, tmp_path: Path) -> None:
    other = issue(tmp_path / "other", "127.0.0.1")
    signature = Signer(other / "driver").sign(STATEMENT)
    with pytest.raises(SecurityError, match=r"no certificate of an authority in ca\.crt"):
        verifier(certs, None).require_signed(STATEMENT, signature)


def test_a_certificate_that_was_revoked_or_has_expired_signs_nothing(
    certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = Signer(certs / "driver").sign(STATEMENT)
    cli(certs, "revoke", "driver")
    crl, authorities = certs / "ca.crl", (certs / "ca.crt").read_bytes()
    revocations = Revocations(crl.read_bytes(), authorities, crl)
    with pytest.raises(SecurityError, match="that has signed it is revoked"):
        verifier(certs, revocations).require_signed(STATEMENT, signature)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=4000)
    monkeypatch.setattr(signatures, "datetime", SimpleNamespace(now=lambda zone: later))
    with pytest.raises(SecurityError, match="that has signed it has expired"):
        verifier(certs, None).require_signed(STATEMENT, signature)


@pytest.mark.parametrize("kind", ["EC", "RSA", "Ed25519", "Ed448"])
def test_keys_of_other_certificate_makers_sign_as_well(certs: Path, kind: str) -> None:
    keys: dict[str, Callable[[], Any]] = {
        "EC": lambda: ec.generate_private_key(ec.SECP384R1()),
        "RSA": lambda: rsa.generate_private_key(65537, 2048),
        "Ed25519": ed25519.Ed25519PrivateKey.generate,
        "Ed448": ed448.Ed448PrivateKey.generate,
    }
    key = keys[kind]()
    authority = Authority.load(certs)
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .serial_number(x509.random_serial_number())
        .public_key(key.public_key())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier("rpcmp://driver")]), False
        )
    )
    folder = certs / "driver"
    made = authority.sign(builder)
    (folder / "tls.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    if kind == "Ed448":
        with pytest.raises(SecurityError, match="another kind than EC, RSA and Ed25519"):
            Signer(folder).sign(STATEMENT)
        return
    verifier(certs, None).require_signed(STATEMENT, Signer(folder).sign(STATEMENT))


def test_an_authority_needs_a_list_if_there_are_any(certs: Path, tmp_path: Path) -> None:
    """As TLS has it: else a certificate of an authority without one could not be revoked."""
    other = issue(tmp_path / "other", "127.0.0.1")
    cli(other, "revoke", "stage0")
    crl, authorities = other / "ca.crl", (other / "ca.crt").read_bytes()
    revocations = Revocations(crl.read_bytes(), authorities, crl)
    both = certs / "both"
    both.mkdir()
    (both / "ca.crt").write_bytes(authorities + (certs / "ca.crt").read_bytes())
    with pytest.raises(SecurityError, match=r"ca\.crl has no list of the authority"):
        verifier(both, revocations).require_signed(
            STATEMENT, Signer(certs / "driver").sign(STATEMENT)
        )
    verifier(both, revocations).require_signed(STATEMENT, Signer(other / "driver").sign(STATEMENT))


def test_a_key_of_another_certificate_signs_nothing(certs: Path) -> None:
    (certs / "driver" / "tls.key").write_bytes((certs / "stage0" / "tls.key").read_bytes())
    with pytest.raises(SecurityError, match="do not belong together"):
        Signer(certs / "driver")
