"""Addresses that need no certificate, roles in certificates, and unusable files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import click
import pytest

from rpcmp.errors import ConfigError, SecurityError
from rpcmp.net import authority, identity
from rpcmp.net.certificates import Certificate
from rpcmp.net.identity import CA, CERTIFICATE, KEY
from rpcmp.net.security import Credentials, Security
from tests.support.lan import cli, issue
from tests.support.places import TESTS


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return issue(tmp_path_factory.mktemp("certs"), "host-a", "192.0.2.7")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.77.0.3", "[::1]", "localhost"])
def test_loopback_needs_no_certificate(host: str) -> None:
    Security().require_allowed([f"{host}:50051"])


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "192.168.0.5", "[::]", "10.0.0.1", "example.org", "localhost.evil.org"]
)
def test_addresses_off_loopback_need_tls_or_insecure(certs: Path, host: str) -> None:
    addresses = ["127.0.0.1:50051", f"{host}:50051"]
    with pytest.raises(ConfigError, match="is not a loopback address"):
        Security().require_allowed(addresses)
    Security(certs / "driver").require_allowed(addresses)
    Security(insecure=True).require_allowed(addresses)


def test_certs_and_insecure_exclude_each_other(certs: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        Security(certs / "driver", insecure=True)


def test_a_certificate_contains_its_holders_role(certs: Path) -> None:
    cli(certs, "issue", "--spare", "--host", "host-c")
    stage1, driver, spare = (Security(certs / name) for name in ("stage1", "driver", "spare"))
    stage1.require_may_serve(1)
    spare.require_may_serve(1)
    spare.require_may_serve(None)
    driver.require_may_drive()
    for security, stage, why in [
        (stage1, 2, "is for stage 1, not for stage 2"),
        (stage1, None, "is for stage 1, not for a spare"),
        (driver, 0, "is for driver, not for stage 0"),
    ]:
        with pytest.raises(SecurityError, match=why):
            security.require_may_serve(stage)
    for security in (stage1, spare):
        with pytest.raises(SecurityError, match="cannot drive"):
            security.require_may_drive()


@pytest.mark.parametrize(
    ("uris", "expected"),
    [
        (["rpcmp://stage/12"], identity.stage(12)),
        (["https://example.org", "rpcmp://spare"], identity.SPARE),
        (["rpcmp://driver/"], identity.DRIVER),
        (["rpcmp://stage/1", "rpcmp://driver"], None),
        (["rpcmp://stage/"], None),
        (["rpcmp://stage/-1"], None),
        (["rpcmp://driver.evil.org"], None),
        ([], None),
    ],
)
def test_a_role_is_one_uri(uris: list[str], expected: identity.Role | None) -> None:
    assert identity.find(uris) == expected
    assert expected is None or identity.find([expected.uri]) == expected


def test_hosts_are_names_and_addresses(certs: Path) -> None:
    assert Certificate.load(certs / "stage0").hosts == ["host-a"]
    assert Certificate.load(certs / "stage1").hosts == ["192.0.2.7"]
    with pytest.raises(SecurityError, match="neither a host name nor an IP address"):
        authority.issue(certs, "odd", identity.stage(0), ["host\u2028b"], 1)


def test_keys_are_readable_only_by_their_owner(certs: Path, tmp_path: Path) -> None:
    for key in (certs / "ca.key", certs / "driver" / KEY):
        assert key.stat().st_mode & 0o777 == 0o600
    folder = tmp_path / "copied"
    shutil.copytree(certs / "driver", folder)
    for mode in (0o644, 0o640, 0o604):
        (folder / KEY).chmod(mode)
        with pytest.raises(SecurityError, match=r"can be read by others \(mode 0"):
            Credentials(folder)
    (folder / KEY).chmod(0o400)
    Credentials(folder)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (CERTIFICATE, None, "tls.crt cannot be read"),
        (CERTIFICATE, "nonsense", "cannot be used"),
        (CA, "nonsense", "cannot be used"),
        (KEY, "nonsense", "cannot be used"),
    ],
)
def test_an_unusable_file_is_named_in_the_error(
    certs: Path, tmp_path: Path, name: str, content: str | None, why: str
) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(certs / "driver", folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(SecurityError, match=why) as error:
        Credentials(folder)
    assert str(folder) in str(error.value)


def test_a_key_of_another_certificate_is_refused(certs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(certs / "driver", folder)
    shutil.copy(certs / "stage0" / KEY, folder / KEY)
    with pytest.raises(SecurityError, match="have to belong together"):
        Credentials(folder)


def test_an_authority_is_not_replaced(certs: Path, tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match="has a certificate authority"):
        authority.create(certs)
    with pytest.raises(SecurityError, match="rpcmp certs init"):
        authority.issue(tmp_path, "stage0", identity.stage(0), ["host-a"], 1)


@pytest.mark.parametrize(
    "options",
    [
        ["--name", "stage0"],
        ["--name", "first", "--host", "host-a"],
        ["--driver", "--spare", "--host", "host-a"],
        ["--stage", "1", "--driver"],
    ],
)
def test_a_certificate_without_exactly_one_role_is_not_issued(
    certs: Path, options: list[str]
) -> None:
    with pytest.raises(click.UsageError):
        cli(certs, "issue", *options)


@pytest.mark.parametrize("name", ["../stage0", ".hidden", "a/b"])
def test_a_name_does_not_lead_out_of_the_folder(certs: Path, name: str) -> None:
    with pytest.raises(SecurityError, match="no name of a folder"):
        cli(certs, "issue", "--name", name, "--driver")


def test_the_threat_model_names_existing_tests() -> None:
    import rpcmp.net

    shown = re.findall(r"shown +(test_[\w, ]+)", rpcmp.net.__doc__ or "")
    names = {name for line in shown for name in re.findall(r"test_\w+", line)}
    assert len(shown) == 8
    assert names - {path.stem for path in TESTS.rglob("test_*.py")} == set()
