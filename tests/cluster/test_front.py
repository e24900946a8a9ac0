"""The port of a stage server: which peers it accepts, in which role, and which it refuses."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from rpcmp.errors import SecurityError
from rpcmp.net import authority, identity
from rpcmp.net.identity import CA, CERTIFICATE, GRPC, KEY, RELAY
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub
from tests.support.lan import cli, issue, serving
from tests.support.processes import (
    JobFolder,
    Result,
    Server,
    poll_for,
    rpcmp,
    running_servers,
)

HERE = "127.0.0.1"


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of every HTTP/2 client."""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Issue valid certificates, and every kind of invalid one."""
    folder = issue(tmp_path_factory.mktemp("certs"), HERE, HERE)
    now, day = datetime.now(UTC), timedelta(days=1)
    authority.issue(folder, "expired", identity.DRIVER, [], 1, now - 3 * day)
    authority.issue(folder, "early", identity.DRIVER, [], 1, now + 3 * day)
    authority.issue(folder, "elsewhere", identity.stage(0), ["host-b"], 1)
    authority.issue(folder, "driver-here", identity.DRIVER, [HERE], 1)
    authority.issue(folder, "spare", identity.SPARE, [HERE], 1)
    authority.issue(folder, "stage0-expired", identity.stage(0), [HERE], 1, now - 3 * day)
    other = tmp_path_factory.mktemp("other")
    cli(other, "init")
    stranger = folder / "stranger"  # trusts our CA, but its certificate comes from another
    shutil.copytree(other / "driver", stranger)
    shutil.copy(folder / CA, stranger / CA)
    return folder


@pytest.fixture(scope="module")
def server(certs: Path) -> Iterator[Server]:
    with serving(0, f"{HERE}:0", certs) as started:
        yield started


def dial(server: Server, folder: Path, protocol: str = GRPC, **more: bool) -> str:
    """Return the server's response to an accepted client, or the reason for a refusal."""
    context = ssl.create_default_context(cafile=str(folder / CA))
    context.set_alpn_protocols([protocol] if protocol else [])
    if more.get("shows_nothing") is None:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    if more.get("is_old"):
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = server.address.rsplit(":", 1)
    try:
        with (
            socket.create_connection((host, int(port)), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            if protocol == GRPC:
                connection.sendall(PREFACE)
            return "answers" if connection.recv(9) else "hangs up"
    except ssl.SSLError as error:
        return error.reason or str(error)
    except ConnectionResetError:
        return "hangs up"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *((name, "answers") for name in ("driver", "stage1", "spare")),
        ("stranger", "TLSV1_ALERT_UNKNOWN_CA"),
        ("expired", "SSLV3_ALERT_CERTIFICATE_EXPIRED"),
        ("early", "SSLV3_ALERT_BAD_CERTIFICATE"),
    ],
)
def test_a_client_is_accepted_by_its_certificate(
    server: Server, certs: Path, name: str, answer: str
) -> None:
    assert dial(server, certs / name) == answer


def test_a_client_without_certificate_or_with_old_tls_is_refused(
    server: Server, certs: Path
) -> None:
    nothing = dial(server, certs / "driver", shows_nothing=True)
    assert nothing == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert dial(server, certs / "driver", is_old=True) == "TLSV1_ALERT_PROTOCOL_VERSION"
    assert dial(server, certs / "driver", protocol="") == "hangs up"


def test_a_certificate_without_a_role_is_refused_everywhere(server: Server, certs: Path) -> None:
    class Nobody(identity.Role):
        uri = "rpcmp://stage/"

    authority.issue(certs, "nobody", Nobody("stage"), [HERE], 1)
    assert dial(server, certs / "nobody") == "hangs up"


def test_plaintext_connections_are_closed(server: Server) -> None:
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(PREFACE)
        answer = connection.recv(100)
    assert b"\x00\x00" not in answer[3:]  # at most a TLS alert, no HTTP/2 frame


def test_a_pickle_sent_to_the_relay_is_never_loaded(
    server: Server, certs: Path, tmp_path: Path
) -> None:
    """No group runs, so the server does not unpickle it, even from a host of the job."""
    marker = tmp_path / "was-here"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    context = ssl.create_default_context(cafile=str(certs / CA))
    context.load_cert_chain(certs / "stage1" / CERTIFICATE, certs / "stage1" / KEY)
    context.set_alpn_protocols([RELAY])
    host, port = server.address.rsplit(":", 1)
    with (
        socket.create_connection((host, int(port)), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        connection.sendall(pickle.dumps(Evil()))
        assert connection.recv(1) == b""
    assert not marker.exists()


def ask(server: Server, certs: Path, name: str, job: JobFolder) -> Result:
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [4]')
    return rpcmp("drive", config, "--connect", server.address, "--certs", certs / name)


def test_a_stage_certificate_cannot_drive(server: Server, certs: Path, job: JobFolder) -> None:
    result = ask(server, certs, "stage1", job)
    assert result.code == 2
    assert "the certificate is for stage 1, which cannot drive" in result.err


def test_a_stage_certificate_cannot_drive_even_if_the_driver_does_not_check(
    server: Server, certs: Path
) -> None:
    """The server checks as well: a stage's certificate permits only what stages need."""

    async def call() -> None:
        dialer = Dialer(Security(certs / "stage1"))
        async with StageClient("a", server.address, dialer, 0) as client:
            assert (await client.connect()).stage_index == 0
            for call in (client.prepare(pb.PrepareRequest(job="evil")), client.drain()):
                with pytest.raises(SecurityError, match=r"stage 'a'.*only a driver may call"):
                    await call

    asyncio.run(call())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("elsewhere", "IP address mismatch"),
        ("stage1", "has a certificate for stage 1, not for stage 0"),
        ("driver-here", "has a certificate for driver, not for stage 0"),
        ("stage0-expired", "certificate has expired"),
    ],
)
def test_a_server_with_the_wrong_identity_gets_no_job(
    certs: Path, job: JobFolder, name: str, why: str
) -> None:
    """A program that pretends to be a server has only the rights of its certificate."""
    code = f"""
import asyncio
from pathlib import Path
from rpcmp.server.admission import Admission
from rpcmp.server.stage_server import StageServer
from rpcmp.net.security import Security

async def main():
    server = StageServer(Admission(0), security=Security(Path({str(certs / name)!r})))
    print(await server.start("{HERE}", 0), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            address = f"{HERE}:{run.stdout.readline().strip()}"
            config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [4]')
            result = rpcmp("drive", config, "--connect", address, "--certs", certs / "driver")
        finally:
            run.kill()
    assert result.code == 2
    assert why in result.err


def test_a_server_with_another_ca_names_the_cause(
    server: Server, certs: Path, job: JobFolder
) -> None:
    result = ask(server, certs, "stranger", job)
    assert result.code == 2
    assert "does not know the CA of our certificate" in result.err


def test_a_draining_server_answers_before_it_closes_the_connection() -> None:
    """The answer is written after the server has started to close."""
    code = f"""
import asyncio
from rpcmp.server.admission import Admission
from rpcmp.server.services import ControlServicer, Endpoints
from rpcmp.server.lifecycle import serve
from rpcmp.server.stage_server import StageServer

drain, close, closes = ControlServicer.Drain, Endpoints.close, asyncio.Event()

async def slow_drain(self, request, grpc_context):
    answer = await drain(self, request, grpc_context)
    await closes.wait()
    for _ in range(50):  # turns of the loop, in which anything that is ready to end does
        await asyncio.sleep(0)
    return answer

async def logged_close(self):
    closes.set()
    await close(self)

async def main():
    await serve(StageServer(Admission(0)), "{HERE}", 0, lambda port: print(port, flush=True))

ControlServicer.Drain, Endpoints.close = slow_drain, logged_close
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            with grpc.insecure_channel(f"{HERE}:{run.stdout.readline().strip()}") as channel:
                assert ControlStub(channel).Drain(pb.DrainRequest(), timeout=20).job == ""
            assert run.wait(20) == 0
        finally:
            run.kill()


def test_renewed_certificates_are_loaded_without_a_restart(certs: Path) -> None:
    with serving(1, f"{HERE}:0", certs) as server:
        host, port = server.address.rsplit(":", 1)
        before = ssl.get_server_certificate((host, int(port)))
        cli(certs, "issue", "--name", "stage1", "--host", HERE)
        after = ssl.get_server_certificate((host, int(port)))
        assert before != after
        assert after == (certs / "stage1" / CERTIFICATE).read_text()
        (certs / "stage1" / CERTIFICATE).write_text("half of a cert")
        assert ssl.get_server_certificate((host, int(port))) == after
        cli(certs, "issue", "--name", "stage1", "--host", HERE)


def test_an_insecure_server_warns(job: JobFolder) -> None:
    with running_servers(1, "--insecure") as (server,):
        poll_for(lambda: "insecure: nothing is encrypted" in "".join(server.run.err), "a warning")
        with grpc.insecure_channel(server.address) as channel:
            assert ControlStub(channel).Describe(pb.DescribeRequest(), timeout=10).stage_index == 0


def test_silent_connections_do_not_block_others(server: Server, certs: Path) -> None:
    host, port = server.address.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port))) for _ in range(300)]
    try:
        assert dial(server, certs / "driver") == "answers"
    finally:
        for connection in silent:
            connection.close()
