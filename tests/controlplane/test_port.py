"""The port of a stage server: which peers it accepts, in which role, and which it refuses."""

from __future__ import annotations

import asyncio
import pickle
import shutil
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rpcmp.errors import SecurityError
from rpcmp.net import authority, identity
from rpcmp.net.identity import CA, CERTIFICATE, GRPC, KEY, RELAY
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from rpcmp.server.services import ControlServicer, Endpoints
from rpcmp.v1 import control_pb2 as pb
from tests.support.controlplane.cluster import Cluster, Server, in_event_loop
from tests.support.lan import cli, issue

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


def dial(server: Server, folder: Path, protocol: str = GRPC, **more: bool) -> str:
    """Return the server's response to an accepted client, or the reason for a refusal.

    Call it on a thread: it blocks, and the server answers from the event loop.
    """
    context = ssl.create_default_context(cafile=str(folder / CA))
    context.set_alpn_protocols([protocol] if protocol else [])
    if more.get("shows_nothing") is None:
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    if more.get("is_old"):
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        with (
            connect(server) as plain,
            context.wrap_socket(plain, server_hostname=HERE) as connection,
        ):
            if protocol == GRPC:
                connection.sendall(PREFACE)
            return "answers" if connection.recv(9) else "hangs up"
    except ssl.SSLError as error:
        return error.reason or str(error)
    except ConnectionResetError:
        return "hangs up"


def connect(server: Server) -> socket.socket:
    return socket.create_connection((HERE, int(server.address.rpartition(":")[2])), timeout=20)


@in_event_loop
async def test_only_clients_with_a_valid_certificate_and_new_tls_are_accepted(
    tmp_path: Path, certs: Path
) -> None:
    class Nobody(identity.Role):
        uri = "rpcmp://stage/"

    authority.issue(certs, "nobody", Nobody("stage"), [HERE], 1)
    async with Cluster(tmp_path, stages=1, certs=certs) as cluster:
        (server,) = cluster.servers

        async def answer(name: str, protocol: str = GRPC, **more: bool) -> str:
            return await asyncio.to_thread(dial, server, certs / name, protocol, **more)

        for name, expected in {
            "driver": "answers",
            "stage1": "answers",
            "spare": "answers",
            "stranger": "TLSV1_ALERT_UNKNOWN_CA",
            "expired": "SSLV3_ALERT_CERTIFICATE_EXPIRED",
            "early": "SSLV3_ALERT_BAD_CERTIFICATE",
            "nobody": "hangs up",
        }.items():
            assert await answer(name) == expected, name
        nothing = await answer("driver", shows_nothing=True)
        assert nothing == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
        assert await answer("driver", is_old=True) == "TLSV1_ALERT_PROTOCOL_VERSION"
        assert await answer("driver", protocol="") == "hangs up"
        silent = [connect(server) for _ in range(100)]
        assert await answer("driver") == "answers"
        for connection in silent:
            connection.close()


@in_event_loop
async def test_plaintext_connections_are_closed(tmp_path: Path, certs: Path) -> None:
    def send() -> bytes:
        with connect(cluster.servers[0]) as connection:
            connection.sendall(PREFACE)
            return connection.recv(100)

    async with Cluster(tmp_path, stages=1, certs=certs) as cluster:
        answer = await asyncio.to_thread(send)
        assert b"\x00\x00" not in answer[3:]  # at most a TLS alert, no HTTP/2 frame


@in_event_loop
async def test_a_pickle_sent_to_the_relay_is_never_loaded(tmp_path: Path, certs: Path) -> None:
    """No group runs, so the server does not unpickle it, even from a host of the job."""
    marker = tmp_path / "was-here"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (marker,)

    context = ssl.create_default_context(cafile=str(certs / CA))
    context.load_cert_chain(certs / "stage1" / CERTIFICATE, certs / "stage1" / KEY)
    context.set_alpn_protocols([RELAY])

    def send() -> bytes:
        with (
            connect(cluster.servers[0]) as plain,
            context.wrap_socket(plain, server_hostname=HERE) as connection,
        ):
            connection.sendall(pickle.dumps(Evil()))
            return connection.recv(1)

    async with Cluster(tmp_path, stages=1, certs=certs) as cluster:
        assert await asyncio.to_thread(send) == b""
        assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stage1", "the certificate is for stage 1, which cannot drive"),
        ("stranger", "does not know the CA of our certificate"),
    ],
)
@in_event_loop
async def test_a_driver_without_a_drivers_certificate_of_the_cluster_gets_no_server(
    tmp_path: Path, certs: Path, name: str, why: str
) -> None:
    async with Cluster(tmp_path, stages=1, certs=certs) as cluster:
        config = cluster.config(f"security.certs={certs / name}")
        run = await cluster.drive(config)
        assert isinstance(run.error, SecurityError)
        assert why in str(run.error)


@in_event_loop
async def test_a_stage_certificate_cannot_drive_even_if_the_driver_does_not_check(
    tmp_path: Path, certs: Path
) -> None:
    """The server checks as well: a stage's certificate permits only what stages need."""
    async with Cluster(tmp_path, stages=1, certs=certs) as cluster:
        dialer = Dialer(Security(certs / "stage1"))
        async with StageClient("a", cluster.servers[0].address, dialer, 0) as client:
            assert (await client.connect()).stage_index == 0
            for call in (client.prepare(pb.PrepareRequest(job="evil")), client.drain()):
                with pytest.raises(SecurityError, match=r"stage 'a'.*only a driver may call"):
                    await call


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("elsewhere", "IP address mismatch"),
        ("stage1", "has a certificate for stage 1, not for stage 0"),
        ("driver-here", "has a certificate for driver, not for stage 0"),
        ("stage0-expired", "certificate has expired"),
    ],
)
@in_event_loop
async def test_a_server_with_the_wrong_identity_gets_no_job(
    tmp_path: Path, certs: Path, name: str, why: str
) -> None:
    """A program that pretends to be a server has only the rights of its certificate."""
    async with Cluster(tmp_path, stages=0, certs=certs) as cluster:
        wrong = await cluster.serve(0, certificate=name)
        run = await cluster.drive(cluster.config(balance=[2]), connect=[wrong.address])
        assert isinstance(run.error, SecurityError)
        assert why in str(run.error)


@in_event_loop
async def test_a_draining_server_answers_before_it_closes_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is written after the server has started to close."""
    drain, close, closes = ControlServicer.Drain, Endpoints.close, asyncio.Event()

    async def slow_drain(self: ControlServicer, *call: object) -> object:
        answer = await drain(self, *call)  # type: ignore[arg-type]
        await closes.wait()
        for _ in range(50):  # turns of the loop, in which anything that is ready to end does
            await asyncio.sleep(0)
        return answer

    async def logged_close(self: Endpoints) -> None:
        closes.set()
        await close(self)

    monkeypatch.setattr(ControlServicer, "Drain", slow_drain)
    monkeypatch.setattr(Endpoints, "close", logged_close)
    async with Cluster(tmp_path, stages=1) as cluster:
        async with cluster.client(cluster.servers[0]) as client:
            await client.connect()
            assert await client.drain() == ""
        await cluster.servers[0].ending


@in_event_loop
async def test_renewed_certificates_are_loaded_without_a_restart(
    tmp_path: Path, certs: Path
) -> None:
    async with Cluster(tmp_path, stages=2, certs=certs) as cluster:

        async def shown() -> str:
            place = (HERE, int(cluster.servers[1].address.rpartition(":")[2]))
            return await asyncio.to_thread(ssl.get_server_certificate, place)

        before = await shown()
        cli(certs, "issue", "--name", "stage1", "--host", HERE)
        after = await shown()
        assert before != after
        assert after == (certs / "stage1" / CERTIFICATE).read_text()
        (certs / "stage1" / CERTIFICATE).write_text("half of a cert")
        assert await shown() == after
        cli(certs, "issue", "--name", "stage1", "--host", HERE)
