"""The methods that each certificate role may call at a stage server with a running job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rpcmp.errors import CheckpointError, RpcmpError, SecurityError
from rpcmp.net.identity import GRPC, RELAY
from rpcmp.net.peer_connection import Dialer, PeerConnection
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from rpcmp.v1 import control_pb2 as pb
from tests.support.lan import cli, issue, serving
from tests.support.processes import JobFolder, Server, connect, poll_for, running

HERE = "127.0.0.1"

JOB = """
name = "secret-job"
steps = 100000
[model]
layers = "zoo:jittery"
kwargs = { milliseconds = 10.0 }
balance = [3, 2]
[checkpoint]
dir = "checkpoints"
every_seconds = 1.0
keep = 1000
shared = true
"""

Call = Callable[[StageClient], Awaitable[Any]]


@dataclass(frozen=True)
class Job:
    """A job on two servers.

    Attributes:
        certs: folder of the certificates.
        servers: the servers of its stages.
        job_id: id of the job.
        file: a file of one of its checkpoints.
    """

    certs: Path
    servers: list[Server]
    job_id: str
    file: Path

    @property
    def identity(self) -> dict[str, Any]:
        """Return the job's identity in messages."""
        return {"job_id": self.job_id, "generation": 1}

    def ask(self, name: str, call: Call, stage: int = 0) -> Any:
        """Return the answer of a stage's server to the holder of a certificate."""
        return asyncio.run(ask(self.certs / name, self.servers[stage].address, call))

    def steps(self, stage: int) -> list[int]:
        """Return the steps of a stage's own snapshots on its server."""
        seen: pb.DescribeResponse = self.ask("driver", lambda client: client.connect(), stage)
        return list(seen.holdings[0].steps)


async def ask(certs: Path, address: str, call: Call) -> Any:
    """Return a server's answer to the holder of a certificate."""
    async with StageClient("asked", address, Dialer(Security(certs))) as client:
        return await asyncio.wait_for(call(client), 30)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Issue certificates for a job's two stages, for a stage outside the job, and for a spare."""
    folder = issue(tmp_path_factory.mktemp("certs"), HERE, HERE)
    cli(folder, "issue", "--stage", "9", "--host", HERE)
    cli(folder, "issue", "--spare", "--host", HERE)
    return folder


@pytest.fixture(scope="module")
def job(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = JobFolder(tmp_path_factory.mktemp("job") / "zoo")
    config = folder.config(JOB)
    with (
        serving(0, f"{HERE}:0", certs) as first,
        serving(1, f"{HERE}:0", certs) as second,
    ):
        servers = [first, second]
        where = ("--connect", connect(servers), "--certs", certs / "driver")
        with running("drive", config, "--json", *where) as run:
            run.wait_for_line('"event": "checkpoint"')
            seen = asyncio.run(ask(certs / "driver", first.address, lambda one: one.connect()))
            file = next((folder.folder / "checkpoints").glob("*/*/*.safetensors"))
            yield Job(certs, servers, seen.holdings_of, file)
            assert run.process.poll() is None
            assert not [event for event in run.result().events if event["event"] == "fault"]


async def fetched(client: StageClient, request: pb.FetchRequest) -> int:
    """Return the number of bytes of a snapshot or file."""
    return sum([len(part.data) async for part in client.fetch(request)])


def snapshot(job: Job, client: StageClient, stage: str, step: int) -> Awaitable[int]:
    return fetched(client, pb.FetchRequest(**job.identity, stage_name=stage, step=step))


def file_of(job: Job, client: StageClient) -> Awaitable[int]:
    return fetched(client, pb.FetchRequest(**job.identity, path=str(job.file)))


def newer(job: Job, client: StageClient) -> Awaitable[int]:
    """Fetch the next snapshot after step 1 as stage 0's mirror, which acknowledges step 1."""
    request = pb.FetchRequest(**job.identity, stage_name="stage0", step=1, newer=True)
    return fetched(client, request)


async def one_newer(job: Job, client: StageClient) -> int:
    """Call `newer` until it succeeds: short steps may overwrite a snapshot while it is read."""
    for _ in range(100):
        with contextlib.suppress(CheckpointError):
            return await newer(job, client)
    raise AssertionError("always overwritten")


OF_MEMBERS: dict[str, tuple[Callable[[Job, StageClient], Awaitable[Any]], str]] = {
    "snapshot": (
        lambda job, client: snapshot(job, client, "stage0", 1),
        "may not read snapshots of 'stage0'",
    ),
    "file": (file_of, "may not read its checkpoints"),
    "mirror": (newer, "may not mirror stage 'stage0'"),
    "set": (lambda job, client: client.store_set(job.identity, "k", b"v"), "use the rendezvous"),
    "get": (lambda job, client: client.store_get(job.identity, ["k"]), "use the rendezvous"),
    "add": (lambda job, client: client.store_add(job.identity, "n", 1), "use the rendezvous"),
    "swap": (
        lambda job, client: client.store_compare_set(job.identity, "k", b"", b"v"),
        "use the rendezvous",
    ),
}


@pytest.mark.parametrize("what", OF_MEMBERS)
def test_a_stage_outside_the_group_is_refused_everything(job: Job, what: str) -> None:
    call, why = OF_MEMBERS[what]
    with pytest.raises(SecurityError) as refused:
        job.ask("stage9", lambda client: call(job, client))
    assert "the certificate is for stage 9, which may not" in str(refused.value)
    assert why in str(refused.value)
    assert "of job 'secret-job'" in str(refused.value)


def test_describe_reveals_no_more_to_a_stage_than_health(job: Job) -> None:
    for name in ("stage9", "stage1", "spare"):
        seen = job.ask(name, lambda client: client.connect())
        assert seen == pb.DescribeResponse()
        assert job.ask(name, lambda client: client.health()) == "SERVING"
    seen = job.ask("driver", lambda client: client.connect())
    assert (seen.job, seen.generation) == ("secret-job", 1)
    assert seen.worker_pid > 0


def test_a_member_can_read_its_groups_data(job: Job) -> None:
    for count, name in enumerate(["stage0", "stage1", "spare"], start=1):
        assert job.ask(name, lambda client: file_of(job, client)) == job.file.stat().st_size
        added = job.ask(name, lambda client: client.store_add(job.identity, "members", 1))
        assert added == str(count).encode()


def test_a_snapshot_is_served_only_to_servers_of_its_stage(job: Job) -> None:
    with pytest.raises(SecurityError, match="stage 1, which may not read snapshots of 'stage0'"):
        job.ask("stage1", lambda client: snapshot(job, client, "stage0", 1))
    poll_for(lambda: snapshot_size(job, "stage0") > 0, "a snapshot for its stage")
    poll_for(lambda: snapshot_size(job, "spare") > 0, "a snapshot for a spare")


def snapshot_size(job: Job, name: str) -> int:
    """Return the bytes of stage 0's newest snapshot; 0 if later ones have overwritten it."""
    step = job.steps(0)[-1]
    try:
        size: int = job.ask(name, lambda client: snapshot(job, client, "stage0", step))
    except CheckpointError:
        return 0
    return size


def test_only_the_mirror_of_a_stage_acknowledges_its_steps(job: Job) -> None:
    for name, number in (("stage0", 0), ("stage9", 9)):
        with pytest.raises(
            SecurityError, match=f"stage {number}, which may not mirror .* only stage 1 may"
        ):
            job.ask(name, lambda client: newer(job, client))
    assert job.ask("stage1", lambda client: one_newer(job, client)) > 0


@pytest.mark.parametrize(
    "what",
    [{"stage_name": "stage0", "step": 1}, {"stage_name": "stage0", "newer": True}, {"path": "/x"}],
)
def test_reads_for_a_past_generation_are_refused(job: Job, what: dict[str, Any]) -> None:
    request = pb.FetchRequest(job_id=job.job_id, generation=0, **what)
    with pytest.raises(RpcmpError, match="does not belong to generation 0"):
        job.ask("driver", lambda client: fetched(client, request))


@pytest.mark.parametrize(
    ("name", "op", "member"),
    [
        ("stage9", "connect", "stage1:0"),
        ("stage9", "connect", "driver"),
        ("stage9", "connect", ""),
        ("stage9", "wait", "driver"),
        ("stage1", "connect", "stage0:0"),
        ("stage1", "connect", "driver"),
        ("stage1", "wait", "driver"),
        ("stage1", "wait", "stage1:0"),
        ("driver", "connect", "stage1:0"),
        ("spare", "wait", "driver"),
    ],
)
def test_a_relay_connection_has_the_identity_of_its_own_certificate(
    job: Job, name: str, op: str, member: str
) -> None:
    assert asyncio.run(hangs_up(job, name, op, member))


async def hangs_up(job: Job, name: str, op: str, member: str) -> bool:
    """Return whether stage 0's server closes a connection that starts with these bytes."""
    dialer = Dialer(Security(job.certs / name))
    end = await dialer.open(job.servers[0].address, RELAY, 0)
    try:
        await end.write_message({**job.identity, "op": op, "from": member})
        await asyncio.wait_for(end.read(1), 30)
    except (EOFError, ConnectionError):
        return True
    finally:
        end.abort()
    return False


@pytest.mark.parametrize(
    ("key", "value"),
    [("addrs/stage0:0", b"uv://127.0.0.1:1"), ("addrs/driver", b"x"), ("names/0", b"stage0:0")],
)
def test_a_member_cannot_join_under_another_name(job: Job, key: str, value: bytes) -> None:
    for call in (
        lambda client: client.store_set(job.identity, key, value),
        lambda client: client.store_compare_set(job.identity, key, b"", value),
    ):
        with pytest.raises(SecurityError, match="may not join job 'secret-job' as"):
            asyncio.run(ask(job.certs / "stage1", job.servers[0].address, call))


def test_one_certificate_cannot_use_up_a_servers_connections(certs: Path) -> None:
    """A stage outside the job keeps the connections open."""
    limit = ("prlimit", "--nofile=256:256")

    async def hold(address: str) -> int:
        dialer = Dialer(Security(certs / "stage9"))
        ends = [await dialer.open(address, GRPC, 0) for _ in range(60)]
        try:
            async with StageClient("a", address, Dialer(Security(certs / "driver"))) as client:
                assert (await client.connect()).stage_index == 0
            return sum(not one for one in await asyncio.gather(*map(_is_closed, ends)))
        finally:
            for end in ends:
                end.abort()

    with serving(0, f"{HERE}:0", certs, limit) as server:
        assert 10 <= asyncio.run(hold(server.address)) <= 16


async def _is_closed(end: PeerConnection) -> bool:
    """Return whether the server closed a connection; it sends a greeting on the others."""
    try:
        await end.read(1)
    except (EOFError, OSError):
        return True
    return False


@pytest.mark.parametrize("name", ["stage0", "stage1", "stage9", "spare"])
def test_only_a_driver_records_a_drivers_state_and_reads_it(job: Job, name: str) -> None:
    async def requests() -> AsyncIterator[pb.RecordRequest]:
        yield pb.RecordRequest(**job.identity, about="forged")

    for call in (lambda client: client.recall(), lambda client: client.record(requests())):
        with pytest.raises(SecurityError, match=r"only a driver may call /rpcmp\.v1\.Control/Rec"):
            job.ask(name, call)
    held = job.ask("driver", lambda client: client.recall())
    assert (held.job, held.job_id) == ("secret-job", job.job_id)
    assert held.about not in ("", "forged")
