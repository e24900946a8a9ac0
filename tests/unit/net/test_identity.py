"""Messages of failed handshakes between a dialer and a port: the cause, and what to do."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rpcmp.errors import SecurityError
from rpcmp.net import authority, identity
from rpcmp.net.identity import CA, CRL, GRPC
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.port import IncomingConnection, PortMultiplexer
from rpcmp.net.security import Security
from tests.support.eventloops import in_event_loop
from tests.support.lan import issue

HERE = "127.0.0.1"


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    return issue(tmp_path / "certs", HERE)


async def connect(client: Path, server: Path, server_name: str | None) -> str:
    async def greet(incoming: IncomingConnection) -> None:
        await incoming.end.write(b"hello")

    port = PortMultiplexer(Security(server), greet, greet)
    dialer = Dialer(Security(client), server_name)
    try:
        address = f"{HERE}:{await port.start(HERE, 0)}"
        end = await dialer.open(address, GRPC, None)
        try:
            return (await end.read(5)).decode()
        except ssl.SSLError as error:  # the server's alert arrives with the first read
            return dialer.refusal(error)
        finally:
            end.close()
    except SecurityError as error:
        return str(error)
    finally:
        await port.stop()


def outcome(client: Path, server: Path, server_name: str | None = None) -> str:
    """Return what the server sends, or the client's error."""
    return asyncio.run(connect(client, server, server_name))


def from_other_authority(folder: Path) -> Path:
    return issue(folder.parent / "other", HERE)


def reissue(certs: Path, name: str, days_ago: int) -> None:
    role = identity.DRIVER if name == "driver" else identity.stage(0)
    begin = datetime.now(UTC) - timedelta(days=days_ago)
    authority.issue(certs, name, role, [] if name == "driver" else [HERE], 1, begin)


def test_a_client_and_a_server_of_one_authority_connect(certs: Path) -> None:
    assert outcome(certs / "driver", certs / "stage0") == "hello"


@pytest.mark.parametrize("sends_authority", [True, False])
def test_a_server_of_another_authority_is_refused_with_both_files_named(
    certs: Path, sends_authority: bool
) -> None:
    server = from_other_authority(certs) / "stage0"
    if not sends_authority:  # OpenSSL sends the authority's certificate along if ca.crt has it
        shutil.copy(certs / CA, server)
    error = outcome(certs / "driver", server)
    assert f"tls.crt of that host is of another authority than {certs}/driver/ca.crt here" in error
    assert "ca.crt of one (`rpcmp certs issue`)" in error


def test_a_client_of_another_authority_learns_which_files_do_not_match(certs: Path) -> None:
    client = from_other_authority(certs) / "driver"
    shutil.copy(certs / CA, client)
    error = outcome(client, certs / "stage0")
    assert f"{client}/tls.crt here is of another authority than ca.crt of that host" in error


@pytest.mark.parametrize("name", ["host-b.example.org", "192.0.2.7"])
def test_a_name_that_the_certificate_lacks_leads_to_a_new_certificate(
    certs: Path, name: str
) -> None:
    error = outcome(certs / "driver", certs / "stage0", name)
    assert f"mismatch, certificate is not valid for '{name}'; issue that host" in error
    assert "rpcmp certs issue DIR --name stageN --host NAME" in error


@pytest.mark.parametrize(
    ("name", "days_ago", "cause", "remedy"),
    [
        ("stage0", 5, "certificate has expired", "renew tls.crt of that host with `rpcmp certs"),
        ("stage0", -5, "certificate is not yet valid", "set the clock of one of the two hosts"),
        ("driver", 5, "our certificate has expired", "driver/tls.crt with `rpcmp certs renew DIR`"),
        ("driver", -5, "does not accept our certificate", "the clocks of both hosts are right"),
    ],
)
def test_a_certificate_outside_its_validity_leads_to_renewal_or_the_clock(
    certs: Path, name: str, days_ago: int, cause: str, remedy: str
) -> None:
    reissue(certs, name, days_ago)
    error = outcome(certs / "driver", certs / "stage0")
    assert cause in error
    assert remedy in error


@pytest.mark.parametrize(
    ("name", "cause", "remedy"),
    [
        ("stage0", "certificate revoked", "issue that host another one"),
        ("driver", "our certificate is revoked", "issue another one with `rpcmp certs issue DIR`"),
    ],
)
def test_a_revoked_certificate_leads_to_another_one(
    certs: Path, name: str, cause: str, remedy: str
) -> None:
    authority.revoke(certs, name)
    if name == "driver":
        (certs / name / CRL).unlink()
    error = outcome(certs / "driver", certs / "stage0")
    assert cause in error
    assert remedy in error


def test_a_name_that_an_old_ca_crt_does_not_permit_leads_to_the_newest_one(
    certs: Path, tmp_path: Path
) -> None:
    for name in ("driver", "stage0"):
        shutil.copytree(certs / name, tmp_path / "old" / name)
    authority.issue(certs, "stage1", identity.stage(1), ["host-z", HERE], 1)
    refused = outcome(tmp_path / "old" / "driver", certs / "stage1")
    assert f"{tmp_path}/old/driver/ca.crt here permits other names" in refused
    assert "copy the newest ca.crt here" in refused
    refused = outcome(certs / "stage1", tmp_path / "old" / "stage0")
    assert "copy the newest ca.crt of its authority to that host" in refused


def test_a_missing_crl_of_a_second_authority_is_named(certs: Path) -> None:
    other, client = from_other_authority(certs), certs / "driver"
    authority.revoke(certs, "stage0")
    (client / CA).write_bytes((certs / CA).read_bytes() + (other / CA).read_bytes())
    error = outcome(client, other / "stage0")
    assert f"{client}/ca.crl has no list of that authority: copy its ca.crl here" in error


@in_event_loop
async def test_a_server_without_tls_is_to_be_started_with_certificates(certs: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, HERE, 0) as server:
        address = f"{HERE}:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(SecurityError, match="does not speak TLS at all: start it with --certs"):
            await Dialer(Security(certs / "driver")).open(address, GRPC, None)
