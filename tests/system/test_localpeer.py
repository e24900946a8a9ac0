"""The owner of the other end of a loopback connection, which servers and clients check.

The victim is the user that runs the tests, root; MALLORY and TRENT are ordinary users.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rpcmp.errors import SecurityError, UnreachableError
from rpcmp.net.identity import RELAY
from rpcmp.net.local_peer import is_trusted, owner
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from tests.support.processes import (
    DEADLINE,
    JobFolder,
    describe,
    rpcmp,
    running_servers,
)
from tests.support.users import MALLORY, TRENT, acting_as

HERE = "127.0.0.1"

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
    print(f"got {len(connection.recv(65536))}", flush=True)  # as one write: it may be killed
sys.stdin.read()
"""


NAMESPACED = """
import ctypes, os, socket, sys
from rpcmp.net.local_peer import is_trusted, owner
user = int(sys.argv[1])
os.setgroups([]), os.setgid(user), os.setuid(user)
assert not ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # after setuid it may not write its map
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
    """Run a process that becomes another user after its imports."""
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
    """Run another user's process at a port; yields the port, then the received bytes."""
    got: list[str] = []
    with child(SQUATTER, port, user, int(accepts)) as process:
        yield int(line(process)), got
        process.kill()
        assert process.stdout is not None
        got += process.stdout.read().splitlines()


@pytest.mark.parametrize("host", [HERE, "::1"])
@pytest.mark.parametrize("user", [0, MALLORY])
def test_the_kernel_names_the_owner_of_the_other_end(host: str, user: int) -> None:
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


@pytest.mark.parametrize("accepts", [True, False], ids=["accepting", "silent"])
def test_no_byte_is_sent_to_a_port_held_by_another_user(job: JobFolder, accepts: bool) -> None:
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


def test_no_byte_is_sent_to_a_user_who_took_a_dead_servers_port() -> None:
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
        while True:  # until the rest of the old connection is gone
            with contextlib.suppress(UnreachableError):
                await client.connect()

    with running_servers(1) as (server,):
        asyncio.run(look(server.address))


def test_insecure_accepts_servers_of_any_user() -> None:
    async def dial(address: str) -> None:
        (await Dialer(Security(insecure=True)).open(address, RELAY, None)).close()

    with squatting(MALLORY) as (port, _):
        asyncio.run(dial(f"{HERE}:{port}"))


@pytest.mark.parametrize(("user", "is_known"), [(MALLORY, True), (OVERFLOW, False)])
def test_in_a_user_namespace_the_overflow_uid_matches_no_user(user: int, is_known: bool) -> None:
    """The kernel shows all users outside of the namespace by that number."""
    with child(NAMESPACED, user) as process:
        shown, port = map(int, line(process).split())
        assert shown == user
        for other, is_ours in ((TRENT, False), (0, False), (user, is_known)):
            with acting_as(other):
                connection = socket.socket()
            with connection:
                connection.connect((HERE, port))
                assert line(process) == str(is_ours), other


def test_outside_a_user_namespace_the_overflow_uid_is_an_ordinary_user() -> None:
    with acting_as(OVERFLOW):
        assert is_trusted(OVERFLOW)
        assert not is_trusted(0)
        assert not is_trusted(TRENT)
        assert not is_trusted(None)


def test_a_server_with_many_foreign_connections_answers() -> None:
    """The server asks about each connection by itself, however many there are."""
    with running_servers(1) as (server,), contextlib.ExitStack() as stack:
        host, _, port = server.address.rpartition(":")

        def knock() -> None:
            with acting_as(MALLORY):
                connection = stack.enter_context(socket.socket())
            connection.connect((host, int(port)))

        for _ in range(2000):
            knock()
        assert rpcmp("health", server.address).code == 0


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of every HTTP/2 client."""


def test_another_user_of_this_machine_is_refused() -> None:
    """Without certificates a server accepts calls only from its own user."""
    with running_servers(1) as (server,):
        host, port = server.address.rsplit(":", 1)
        with acting_as(MALLORY):  # the creator of a socket owns it
            connection = socket.socket()
        with connection:
            connection.settimeout(20)
            connection.connect((host, int(port)))
            assert heard(connection) == b""
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            assert heard(connection) != b""
        assert describe(server).stage_index == 0


def test_root_is_another_user_too() -> None:
    """What root's server runs for a job is confined and root's, which another user cannot see."""
    apart = ("prctl(", "unshare(", "uid_map")
    lines = [each for each in NAMESPACED.splitlines() if not any(word in each for word in apart)]
    with child("\n".join(lines), MALLORY) as process:
        _, port = map(int, line(process).split())
        for other in (TRENT, 0, MALLORY):
            with acting_as(other):
                connection = socket.socket()
            with connection:
                connection.connect((HERE, port))
                assert line(process) == str(other == MALLORY), other


def heard(connection: socket.socket) -> bytes:
    """Return a server's bytes to an HTTP/2 client; empty if it hangs up."""
    try:
        connection.sendall(PREFACE)
        return connection.recv(9)
    except (ConnectionResetError, BrokenPipeError):
        return b""
