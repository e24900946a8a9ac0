"""Revoked certificates, renewed ones, and names that an authority may not certify."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rpcmp.errors import SecurityError
from rpcmp.net import authority, certificates, identity
from rpcmp.net.certificates import Certificate, Revocations
from rpcmp.net.identity import CA, CRL, GRPC, KEY, TlsState
from rpcmp.net.security import Credentials, Security, expiry_warning
from tests.support.lan import cli, issue

HERE = "127.0.0.1"


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    return issue(tmp_path / "certs", HERE, "host-b")


def old_authority(folder: Path) -> None:
    """An authority as rpcmp 0.1.0 made it: ten years, any name, no record."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rpcmp private CA")])
    now = datetime.now(UTC)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir()
    (folder / "ca.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "ca.key").chmod(0o600)
    (folder / CA).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def meet(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> str:
    """Return "ok", or why a handshake fails."""
    return shake(TlsState(client, host), TlsState(server))


def shake(one: TlsState, other: TlsState) -> str:
    """Return "ok", or why the handshake of two ends fails."""
    try:
        done = False
        while not done:
            done = one.handshake()
            other.feed(one.to_send())
            other.handshake()
            one.feed(other.to_send())
    except ssl.SSLCertVerificationError as error:
        return str(error.verify_message)
    return "ok"


def between(client: Path, server: Path, host: str = HERE) -> str:
    return meet(Credentials(client).client(GRPC), Credentials(server).server(), host)


def test_a_revoked_certificate_is_refused_on_both_sides(certs: Path) -> None:
    assert between(certs / "driver", certs / "stage0") == "ok"
    cli(certs, "revoke", "stage0")
    assert between(certs / "driver", certs / "stage0") == "certificate revoked"
    cli(certs, "issue", "--name", "stage0", "--host", HERE)
    assert between(certs / "driver", certs / "stage0") == "ok"
    cli(certs, "revoke", "driver")
    assert between(certs / "driver", certs / "stage0") == "certificate revoked"
    with pytest.raises(SecurityError, match="nothing to revoke"):
        cli(certs, "revoke", "driver")


class Connection:
    """A verified connection that nothing is sent over."""

    def __init__(self, session: TlsState) -> None:
        self.session: TlsState | None = session
        self.gone = asyncio.Event()

    def shut_down(self) -> None:
        self.gone.set()


def test_connections_of_a_revoked_peer_end_and_its_role_is_told(certs: Path) -> None:
    driver, connections = Security(certs / "driver"), []
    for stage, host in (("stage0", HERE), ("stage1", "host-b")):
        one = TlsState(Credentials(certs / "driver").client(GRPC), host)
        other = TlsState(Credentials(certs / stage).server())
        assert shake(one, other) == "ok"
        connections.append(Connection(one))
        driver.establish(connections[-1])
    assert driver.end_revoked() == []
    cli(certs, "revoke", "stage1")
    assert driver.credentials is not None
    driver.credentials.refresh()
    assert driver.end_revoked() == ["stage 1"]
    assert [connection.gone.is_set() for connection in connections] == [False, True]
    assert driver.end_revoked() == []
    with pytest.raises(SecurityError, match="certificate revoked"):
        driver.establish(Connection(one))


def test_revoke_covers_every_certificate_issued_under_the_name(certs: Path, tmp_path: Path) -> None:
    shutil.copytree(certs / "driver", tmp_path / "stolen")
    cli(certs, "renew", "driver")
    assert authority.revoke(certs, "driver") == 2
    assert (certs / certificates.RECORD).stat().st_mode & 0o777 == 0o600
    assert between(tmp_path / "stolen", certs / "stage0") == "certificate revoked"
    for folder in (certs / "stage0", certs / "stage1", certs / "driver"):
        assert (folder / CRL).read_bytes() == (certs / CRL).read_bytes()


@pytest.mark.parametrize("kind", ["nonsense", "another's"])
def test_an_unusable_crl_is_refused_and_on_reload_the_last_one_stays(
    certs: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = issue(tmp_path / "other", HERE)
    cli(other, "revoke", "driver")
    bad = b"nonsense" if kind == "nonsense" else (other / CRL).read_bytes()
    cli(certs, "revoke", "driver")
    server = Credentials(certs / "stage0")
    client = Credentials(certs / "driver").client(GRPC)
    (certs / "stage0" / CRL).write_bytes(bad)
    for _ in range(3):
        assert meet(client, server.server(), HERE) == "certificate revoked"
    assert caplog.text.count("is not renewed") == 1
    with pytest.raises(SecurityError, match=r"no CRL in PEM|is not signed by an authority"):
        Credentials(certs / "stage0")


def test_a_new_crl_is_loaded_and_a_removed_one_stays_in_force(
    certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = Credentials(certs / "stage0"), Credentials(certs / "driver").client(GRPC)
    assert meet(client, server.server(), HERE) == "ok"
    cli(certs, "revoke", "driver")
    assert meet(client, server.server(), HERE) == "certificate revoked"
    (certs / "stage0" / CRL).unlink()
    assert meet(client, server.server(), HERE) == "certificate revoked"
    assert "ca.crl is gone" in caplog.text


def test_an_authority_of_rpcmp_0_1_0_can_still_issue_and_revoke(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs = tmp_path / "old"
    old_authority(certs)
    for name, kind, hosts in [
        ("driver", identity.DRIVER, []),
        ("stage0", identity.stage(0), [HERE]),
    ]:
        authority.issue(certs, name, kind, hosts, 365)
    (certs / certificates.RECORD).unlink()
    cli(certs, "issue", "--name", "stage1", "--host", "any.example.org")
    assert "is new" not in capsys.readouterr().out
    assert between(certs / "driver", certs / "stage0") == "ok"
    shutil.copytree(certs / "driver", tmp_path / "before")
    cli(certs, "renew", "driver")
    cli(certs, "revoke", "driver")
    assert "2 certificates of driver revoked" in (output := capsys.readouterr().out)
    assert "which kept no record" in output
    assert between(tmp_path / "before", certs / "stage0") == "certificate revoked"


def test_renewal_keeps_role_hosts_and_the_authority_until_half_of_its_life(
    certs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(certs / "stage0", certs.parent / "copied")
    cli(certs, "revoke", "stage1")
    before, ca = Certificate.load(certs / "stage0"), (certs / CA).read_bytes()
    cli(certs, "renew")
    after = Certificate.load(certs / "stage0")
    assert (after.role, after.hosts) == (before.role, before.hosts)
    assert (certs / "stage0" / KEY).read_bytes() != (certs.parent / "copied" / KEY).read_bytes()
    assert (certs / CA).read_bytes() == ca
    assert "stage1 is revoked, so not renewed" in capsys.readouterr().out
    monkeypatch.setattr(authority.Authority, "is_aged", True)
    cli(certs, "renew")
    assert (certs / "stage1" / CA).read_bytes() == (certs / CA).read_bytes() != ca
    assert between(certs / "driver", certs.parent / "copied") == "ok"  # same key and name
    assert "ca.crt is new" in capsys.readouterr().out
    with pytest.raises(SecurityError, match="no certificate called 'stage7'"):
        cli(certs, "renew", "stage7")


def test_a_certificate_does_not_outlive_its_authority(certs: Path) -> None:
    with pytest.raises(SecurityError, match=r"the authority in .* expires on"):
        authority.issue(certs, "driver", identity.DRIVER, [], 1000)


@pytest.mark.parametrize(
    ("host", "subtree"),
    [
        ("host-a", "host-a"),
        ("node.digits", "node.digits"),
        ("Gpu1.cluster.example.org", "cluster.example.org"),
        ("gpu1.example.org", "example.org"),
        ("example.co.uk", "example.co.uk"),
        ("gpu1.example.co.uk", "example.co.uk"),
        ("10.1.2.3", "10.0.0.0/8"),
        ("100.100.1.1", "100.64.0.0/10"),
        ("fd00::7", "fc00::/7"),
        ("192.0.2.7", "192.0.2.7/32"),
        ("2001:db8::1", "2001:db8::1/128"),
    ],
)
def test_a_host_permits_its_domain_or_private_network(host: str, subtree: str) -> None:
    found = certificates.subtree_around(host)
    assert str(found.value) == subtree
    assert certificates.is_permitted(certificates.general_name(host), [found])


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        ("rpcmp://stage/0", "www.example.org"),
        ("rpcmp://stage/0", "8.8.8.8"),
        ("https://example.org/", HERE),
    ],
)
def test_a_name_outside_the_name_constraints_is_refused(certs: Path, uri: str, host: str) -> None:
    """Even a stolen key of the authority certifies only the names of the job's hosts."""
    ca = (certs / CA).read_bytes()

    class Any(identity.Role):
        @property
        def uri(self) -> str:
            return uri

    authority.issue(certs, "liar", Any("stage"), [host], 1)
    for folder in (certs, certs / "driver", certs / "liar"):
        (folder / CA).write_bytes(ca)
    assert between(certs / "driver", certs / "liar", host) == "permitted subtree violation"


def test_a_new_host_widens_the_authority_with_a_message(
    certs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(certs / "driver", tmp_path / "elsewhere")
    capsys.readouterr()
    cli(certs, "issue", "--name", "stage2", "--host", "host-c")
    assert "ca.crt is new, and permits host-c" in capsys.readouterr().out
    assert between(certs / "driver", certs / "stage2", "host-c") == "ok"
    refused = between(tmp_path / "elsewhere", certs / "stage2", "host-c")
    assert refused == "permitted subtree violation"
    shutil.copy(certs / CA, tmp_path / "elsewhere")
    assert between(tmp_path / "elsewhere", certs / "stage2", "host-c") == "ok"
    cli(certs, "issue", "--name", "stage3", "--host", "host-c")
    assert "is new" not in capsys.readouterr().out


def test_init_permits_additional_domains_and_networks(tmp_path: Path) -> None:
    cli(tmp_path / "certs", "init", "--permit", "lab.example", "--permit", "192.0.2.0/24")
    for hosts in (["gpu7.lab.example"], ["192.0.2.9"], ["localhost"], ["::1"]):
        assert not authority.permit(tmp_path / "certs", hosts)


def test_a_certificate_that_expires_soon_causes_a_warning(certs: Path) -> None:
    credentials = Credentials(certs / "driver")
    now = datetime.now(UTC)
    assert expiry_warning(credentials, now) == ""
    assert "in 6 days: renew it" in expiry_warning(credentials, now + timedelta(days=24))
    assert "has expired: renew it" in expiry_warning(credentials, now + timedelta(days=31))


def test_connections_of_an_authority_that_was_replaced_end(certs: Path, tmp_path: Path) -> None:
    other = issue(tmp_path / "other", HERE)
    shutil.copytree(certs / "driver", tmp_path / "driver")
    driver = Security(tmp_path / "driver")
    one = TlsState(Credentials(certs / "driver").client(GRPC), HERE)
    assert shake(one, TlsState(Credentials(certs / "stage0").server())) == "ok"
    connection = Connection(one)
    driver.establish(connection)
    assert driver.credentials is not None
    before = driver.credentials.authorities
    assert driver.end_of_other_authorities(before) == []
    for name in ("ca.crt", "tls.crt", "tls.key"):
        shutil.copy(other / "driver" / name, tmp_path / "driver" / name)
    driver.credentials.refresh()
    assert driver.end_of_other_authorities(before) == ["stage 0"]
    assert connection.gone.is_set()


def test_an_older_list_makes_nothing_valid_again(
    certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cli(certs, "revoke", "stage1")
    older = (certs / "driver" / "ca.crl").read_bytes()
    credentials = Credentials(certs / "driver")
    held = credentials.revocations
    assert held is not None
    later = Revocations(older, (certs / "ca.crt").read_bytes(), certs / "ca.crl")
    assert not later.is_older_than(held)
    (newer,) = later._lists
    made = SimpleNamespace(
        issuer=newer.issuer, last_update_utc=newer.last_update_utc + timedelta(days=1)
    )
    held._lists = [made]  # type: ignore[list-item]
    (certs / "driver" / "ca.crl").write_bytes(older)
    credentials.refresh()
    assert credentials.revocations is held
    assert "is older than the one before, and would make valid again" in caplog.text
