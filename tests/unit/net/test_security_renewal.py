"""Renewed certificates are used from the next handshake on."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from rpcmp.net.identity import CERTIFICATE, GRPC, RELAY
from rpcmp.net.security import Credentials
from tests.support.lan import cli, issue

HERE = "127.0.0.1"


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    return issue(tmp_path / "certs", HERE)


def renew(certs: Path, name: str) -> None:
    who = ("--driver",) if name == "driver" else ("--name", name, "--host", HERE)
    cli(certs, "issue", *who)


def written(certs: Path, name: str) -> bytes:
    """Return the certificate in a file as DER, which connections have."""
    return ssl.PEM_cert_to_DER_cert((certs / name / CERTIFICATE).read_text())


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[bytes, bytes]:
    """Return the certificates that the client and the server presented."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=HERE)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(4):
        for end in {here, there} - done:
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                continue
    return there.getpeercert(binary_form=True) or b"", here.getpeercert(binary_form=True) or b""


@pytest.mark.parametrize("protocol", [GRPC, RELAY])
def test_client_and_server_use_a_renewed_certificate(certs: Path, protocol: str) -> None:
    driver, stage = Credentials(certs / "driver"), Credentials(certs / "stage0")
    seen = [shake_hands(driver.client(protocol), stage.server())]
    for name in ("driver", "stage0"):
        renew(certs, name)
        seen.append(shake_hands(driver.client(protocol), stage.server()))
        assert seen[-1] == (written(certs, "driver"), written(certs, "stage0"))
    assert len({first for first, _ in seen}) == len({second for _, second in seen}) == 2


def test_an_unchanged_file_is_not_read_again(certs: Path) -> None:
    stage = Credentials(certs / "stage0")
    assert stage.server() is stage.server()
    assert stage.website() is stage.website()
