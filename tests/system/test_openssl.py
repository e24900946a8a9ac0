"""OpenSSL's own program also rejects a certificate that its authority may not sign."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rpcmp.net import authority, identity
from rpcmp.net.identity import CA, CERTIFICATE
from tests.support.lan import issue
from tests.support.needs import needs

HERE = "127.0.0.1"


def verified(certs: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run OpenSSL's verification of a certificate by name."""
    files = (certs / CA, certs / name / CERTIFICATE)
    command = [needs("openssl"), "verify", "-CAfile", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        ("rpcmp://stage/0", "www.example.org"),
        ("rpcmp://stage/0", "8.8.8.8"),
        ("https://example.org/", HERE),
    ],
)
def test_a_name_outside_the_name_constraints_is_refused(
    tmp_path: Path, uri: str, host: str
) -> None:
    """See the test of that name in tests/unit/net/test_certificates.py."""
    certs = issue(tmp_path / "certs", HERE)
    ca = (certs / CA).read_bytes()

    class Any(identity.Role):
        @property
        def uri(self) -> str:
            return uri

    assert verified(certs, "stage0").returncode == 0
    authority.issue(certs, "liar", Any("stage"), [host], 1)
    (certs / CA).write_bytes(ca)
    verification = verified(certs, "liar")
    assert verification.returncode != 0
    assert "permitted subtree violation" in verification.stderr
