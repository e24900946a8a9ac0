"""Whose the other end of a loopback connection is: servers look, and so do their clients.

The victim is the user that runs the tests, root; MALLORY and TRENT are ordinary users.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from rpcmp.control.client import StageClient
from rpcmp.errors import SecurityError, UnreachableError
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub
from rpcmp.wire import localpeer
from rpcmp.wire.credentials import RELAY
from rpcmp.wire.dialer import Dialer
from rpcmp.wire.front import Front, Visitor
from rpcmp.wire.inner import Inner
from rpcmp.wire.localpeer import is_trusted, owner
from rpcmp.wire.security import Security
from tests.support.processes import (
    DEADLINE,
    JobFolder,
    connect,
    describe,
    rpcmp,
    running,
    running_servers,
    runs,
)

HERE = "127.0.0.1"

MALLORY, TRENT = 61001, 61002

OVERFLOW = 65534

SQUATTER = """
import encodings.idna, os, socket, sys
"".encode("idna")
port, user, accepts = map(int, sys.argv[1:])
os.setgroups([]), os.setgid(user), os.setuid(user)
listener = socket.create_server(("127.0.0.1", port))
print(listener.getsockname()[1], flush=True)
while accepts:
    connection, _ = listener.accept()
    print("got", len(connection.recv(65536)), flush=True)
sys.stdin.read()
"""

NAMESPACED = """
import ctypes, os, socket, sys
from rpcmp.wire.localpeer import is_trusted, owner
user = int(sys.argv[1])
os.setgroups([]), os.setgid(user), os.setuid(user)
assert not ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # who has changed users may not write its map
assert not ctypes.CDLL(None).unshare(0x10000000)
open("/proc/self/uid_map", "w").write(f"{user} {user} 1")
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(os.geteuid(), listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        print(is_trusted(owner(connection)), flush=True)
"""


@contextlib.contextmanager
def child(code: str, *arguments: int) -> Iterator[subprocess.Popen[str]]:
    """A process that becomes another user once it has imported what it needs."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextlib.contextmanager
def squatting(user: int, port: int = 0, accepts: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Another user's process at a port; its port, and what it got, once the block is left."""
    got: list[str] = []
    with child(SQUATTER, port, user, int(accepts)) as process:
        yield int(line(process)), got
        process.kill()
        assert process.stdout is not None
        got += process.stdout.read().splitlines()


@contextlib.contextmanager
def acting_as(user: int) -> Iterator[None]:
    """Sockets that are made in the block are another user's."""
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("host", [HERE, "::1"])
@pytest.mark.parametrize("user", [0, MALLORY])
def test_the_kernel_says_whose_the_other_end_is(host: str, user: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        with acting_as(user):
            near = socket.socket(family)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
        with far:
            assert owner(far) == user
            assert owner(near) == 0
            near.close()
            assert owner(far) is None


def test_so_it_does_through_a_socket_for_both_protocols() -> None:
    with socket.create_server((HERE, 0)) as listener, socket.socket(socket.AF_INET6) as near:
        near.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        far, _ = listener.accept()
        with far:
            assert owner(far) == owner(near) == 0
    both = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    with both as listener, socket.create_connection((HERE, listener.getsockname()[1])) as near:
        far, _ = listener.accept()
        with far:
            assert owner(far) == owner(near) == 0


@pytest.mark.parametrize("accepts", [True, False], ids=["accepting", "silent"])
def test_a_port_that_another_user_holds_gets_no_byte(job: JobFolder, accepts: bool) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [4]')
    with squatting(MALLORY, accepts=accepts) as (port, got):
        address = f"{HERE}:{port}"
        for command in (
            ["drive", config, "--connect", address],
            ["health", address],
        ):
            result = rpcmp(*command)
            assert result.code == 2, result.err
            assert f"{address} is served by uid {MALLORY}, not by you" in result.err
            assert "--certs" in result.err
        with pytest.raises(SecurityError, match="not by you"):
            asyncio.run(Dialer(Security()).open(address, RELAY, None))
    assert set(got) <= {"got 0"}


def test_nor_does_one_that_takes_the_port_of_a_server_that_died() -> None:
    async def look(address: str) -> None:
        async with StageClient("a", address, Dialer(Security())) as client:
            assert (await client.connect()).stage_index == 0
            server.run.process.kill()
            await asyncio.to_thread(server.run.process.wait)
            with (
                squatting(TRENT, int(address.rpartition(":")[2])) as (_, got),
                pytest.raises(SecurityError, match=f"served by uid {TRENT}, not by you"),
            ):
                async with asyncio.timeout(DEADLINE):
                    await refused(client)
            assert set(got) <= {"got 0"}

    async def refused(client: StageClient) -> None:
        while True:  # until what is left of the old connection is gone
            with contextlib.suppress(UnreachableError):
                await client.connect()

    with running_servers(1) as (server,):
        asyncio.run(look(server.address))


def test_insecure_means_whoever_serves() -> None:
    async def dial(address: str) -> None:
        (await Dialer(Security(insecure=True)).open(address, RELAY, None)).close()

    with squatting(MALLORY) as (port, _):
        asyncio.run(dial(f"{HERE}:{port}"))


def test_a_port_that_no_process_here_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it looks where the kernel forwards a port into a container."""
    ask = localpeer._ask

    def without_listeners(local: localpeer.Place, remote: localpeer.Place) -> object:
        return None if not remote[1] else ask(local, remote)

    monkeypatch.setattr(localpeer, "_ask", without_listeners)
    with (
        socket.create_server((HERE, 0)) as listener,
        pytest.raises(SecurityError, match="forwarded to a container"),
    ):
        asyncio.run(Dialer(Security()).open(f"{HERE}:{listener.getsockname()[1]}", RELAY, None))


def test_a_kernel_that_does_not_say_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(localpeer, "_SOCK_DIAG", 31)  # there is no such service

    async def refuse(visitor: Visitor) -> None:
        raise AssertionError("it has come in")

    async def start() -> None:
        front = Front(Security(), Inner(Path()), Path(), Path(), refuse)
        try:
            await front.start(HERE, 0)
        finally:
            await front.stop()

    with pytest.raises(SecurityError, match=r"does not say whose.*--certs.*--insecure"):
        asyncio.run(start())
    with (
        socket.create_server((HERE, 0)) as listener,
        pytest.raises(SecurityError, match=r"does not say whose.*--certs.*--insecure"),
    ):
        asyncio.run(Dialer(Security()).open(f"{HERE}:{listener.getsockname()[1]}", RELAY, None))


@pytest.mark.parametrize(("user", "is_known"), [(MALLORY, True), (OVERFLOW, False)])
def test_in_a_user_namespace_the_overflow_uid_is_nobodys_own(user: int, is_known: bool) -> None:
    """Every user that the namespace does not have shows by that number."""
    with child(NAMESPACED, user) as process:
        shown, port = map(int, line(process).split())
        assert shown == user
        for other, is_ours in ((TRENT, False), (0, False), (user, is_known)):
            with acting_as(other):
                connection = socket.socket()
            with connection:
                connection.connect((HERE, port))
                assert line(process) == str(is_ours), other


def test_outside_of_one_it_is_a_user_as_any_other() -> None:
    with acting_as(OVERFLOW):
        assert is_trusted(OVERFLOW)
        assert is_trusted(0)
        assert not is_trusted(TRENT)
        assert not is_trusted(None)


def test_a_server_under_many_connections_of_others_answers() -> None:
    """Each is asked about by itself, however many there are."""
    with running_servers(1) as (server,), contextlib.ExitStack() as stack:
        host, _, port = server.address.rpartition(":")

        def knock() -> None:
            with acting_as(MALLORY):
                connection = stack.enter_context(socket.socket())
            connection.connect((host, int(port)))

        for _ in range(2000):
            knock()
        assert rpcmp("health", server.address).code == 0


def test_a_server_that_never_accepts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcmp.wire.dialer.OPEN_SECONDS", 0.2)
    with (
        socket.create_server((HERE, 0)) as listener,
        pytest.raises(UnreachableError, match="does not answer within"),
    ):
        asyncio.run(Dialer(Security()).open(f"{HERE}:{listener.getsockname()[1]}", RELAY, None))


CALLING = """
import grpc, torch, zoo
from torch import nn
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub

class Calling(nn.Module):
    def __init__(self, address):
        super().__init__()
        with grpc.insecure_channel(address) as channel:
            for call, request in (("Describe", pb.DescribeRequest()), ("Drain", pb.DrainRequest())):
                try:
                    answer = getattr(ControlStub(channel), call)(request, timeout=10)
                    print("CALLED", call, answer.supervisor_pid, flush=True)
                except grpc.RpcError as error:
                    print("CALLED", call, error.code().name, flush=True)

    def forward(self, x):
        return x

def layers(address):
    return [*zoo.mlp(), ("calling", lambda: Calling(address))]
"""


def test_a_server_does_not_work_for_code_of_jobs(job: JobFolder) -> None:
    """It runs as the same user, and so could have other servers of his work for it."""
    (job.folder / "calling.py").write_text(CALLING)
    with running_servers(2) as servers, running_servers(1) as (other,):
        config = job.config(
            f"""
            steps = 2
            [model]
            layers = "calling:layers"
            kwargs = {{ address = "{other.address}" }}
            balance = [2, 3]
            """
        )
        result = rpcmp("drive", config, "--json", "--connect", connect(servers))
        assert result.code == 0, result.err
        said = [event["text"] for event in result.events if event["event"] == "log"]
        assert "CALLED Describe 0" in said  # no more than health says
        assert "CALLED Drain PERMISSION_DENIED" in said
        assert describe(other).supervisor_pid == other.run.process.pid


LONG = """
steps = 100000
[model]
layers = "zoo:mlp"
balance = [2, 2]
"""


def test_a_jobs_own_servers_work_for_its_process_alone(job: JobFolder) -> None:
    with running("drive", job.config(LONG), "--json") as run:
        run.wait_for_line('"event": "step"')
        servers = [p for p in psutil.Process(run.process.pid).children() if runs(p, "serve")]
        (port, *_) = (c.laddr.port for c in servers[0].net_connections() if c.status == "LISTEN")
        with grpc.insecure_channel(f"{HERE}:{port}") as channel:
            stub = ControlStub(channel)
            assert stub.Describe(pb.DescribeRequest(), timeout=10).job == ""
            with pytest.raises(grpc.RpcError, match="does not let that process call"):
                stub.Drain(pb.DrainRequest(), timeout=10)
