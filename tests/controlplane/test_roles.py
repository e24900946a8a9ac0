"""The methods that each certificate role may call at a stage server with a running job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from rpcmp.errors import BusyError, RpcmpError, SecurityError
from rpcmp.net.identity import RELAY, Role
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.observability.events import CheckpointEvent
from rpcmp.server.client import StageClient
from rpcmp.server.services import MAX_FETCHING_EACH, SnapshotsServicer
from rpcmp.v1 import control_pb2 as pb
from tests.support.controlplane.cluster import Cluster, in_event_loop, reference
from tests.support.lan import cli, issue

HERE = "127.0.0.1"

STEP = 6
"""The step after which the job waits for a test."""

Call = Callable[[StageClient], Awaitable[Any]]


@dataclass(frozen=True)
class Job:
    """A job on two servers, each with the certificate of its stage.

    Attributes:
        identity: the job's, in messages.
        file: a file of one of its checkpoints.
    """

    cluster: Cluster
    certs: Path
    identity: dict[str, Any]
    file: Path

    async def ask(self, name: str, call: Call) -> Any:
        """Return the answer of the first stage's server to the holder of a certificate."""
        dialer = Dialer(Security(self.certs / name))
        async with StageClient("asked", self.cluster.servers[0].address, dialer) as client:
            return await asyncio.wait_for(call(client), 10)

    async def fetch(self, name: str, **what: Any) -> int:
        """Return the size of a snapshot or file that the holder of a certificate gets."""
        request = pb.FetchRequest(**{**self.identity, **what})

        async def fetched(client: StageClient) -> int:
            return sum([len(part.data) async for part in client.fetch(request)])

        size: int = await self.ask(name, fetched)
        return size


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Issue certificates for a job's two stages, for a stage outside the job, and for a spare."""
    folder = issue(tmp_path_factory.mktemp("certs"), HERE, HERE)
    cli(folder, "issue", "--stage", "9", "--host", HERE)
    cli(folder, "issue", "--spare", "--host", HERE)
    return folder


@contextlib.asynccontextmanager
async def running_job(folder: Path, certs: Path) -> AsyncIterator[Job]:
    """Yield a job that waits after a step; it goes on to its end undisturbed."""
    async with Cluster(folder, certs=certs) as cluster:
        is_asked: list[bool] = []
        cluster.hold(STEP + 1, lambda: is_asked)
        saves = ("checkpoint.dir=saved", "checkpoint.every_steps=3", "checkpoint.shared=true")
        driving = asyncio.create_task(cluster.drive(cluster.config("name=secret-job", *saves)))
        await cluster.until(lambda: cluster.run.step == STEP and cluster.run.of(CheckpointEvent))
        job_id = cluster.servers[0].served.driver.job_id
        file = Path(cluster.run.of(CheckpointEvent)[0].path, "stage0.safetensors")
        yield Job(cluster, certs, {"job_id": job_id, "generation": 1}, file)
        is_asked.append(True)
        assert (await driving).committed == reference()
        assert cluster.run.generation == 1


MIRROR = {"stage_name": "stage0", "step": 1, "newer": True}
"""What the mirror of the first stage fetches next; it acknowledges step 1."""


@in_event_loop
async def test_a_stage_outside_the_group_is_refused_everything(tmp_path: Path, certs: Path) -> None:
    async with running_job(tmp_path, certs) as job:

        def of_store(call: Call) -> Callable[[], Awaitable[Any]]:
            return lambda: job.ask("stage9", call)

        ours = job.identity
        calls: list[tuple[Callable[[], Awaitable[Any]], str]] = [
            (
                lambda: job.fetch("stage9", stage_name="stage0", step=1),
                "may not read snapshots of 'stage0'",
            ),
            (lambda: job.fetch("stage9", path=str(job.file)), "may not read its checkpoints"),
            (lambda: job.fetch("stage9", **MIRROR), "may not mirror stage 'stage0'"),
            (of_store(lambda client: client.store_set(ours, "k", b"v")), "use the rendezvous"),
            (of_store(lambda client: client.store_get(ours, ["k"])), "use the rendezvous"),
            (of_store(lambda client: client.store_add(ours, "n", 1)), "use the rendezvous"),
            (
                of_store(lambda client: client.store_compare_set(ours, "k", b"", b"v")),
                "use the rendezvous",
            ),
        ]
        for call, why in calls:
            with pytest.raises(SecurityError) as refused:
                await call()
            assert "the certificate is for stage 9, which may not" in str(refused.value)
            assert why in str(refused.value)
            assert "of job 'secret-job'" in str(refused.value)


@in_event_loop
async def test_describe_reveals_no_more_to_a_stage_than_health(tmp_path: Path, certs: Path) -> None:
    async with running_job(tmp_path, certs) as job:
        for name in ("stage9", "stage1", "spare"):
            seen = await job.ask(name, lambda client: client.connect())
            assert seen == pb.DescribeResponse()
            assert await job.ask(name, lambda client: client.health()) == "SERVING"
        seen = await job.ask("driver", lambda client: client.connect())
        assert (seen.job, seen.generation) == ("secret-job", 1)
        assert seen.worker_pid > 0


@in_event_loop
async def test_a_member_can_read_its_groups_data(tmp_path: Path, certs: Path) -> None:
    async with running_job(tmp_path, certs) as job:
        with pytest.raises(RpcmpError, match="the driver has named no file"):
            await job.fetch("stage1", path=str(job.file))
        named = pb.CheckRequest(files=[pb.CheckpointFile(path=str(job.file))])
        await job.ask("driver", lambda client: client.check(named))
        for count, name in enumerate(["stage0", "stage1", "spare"], start=1):
            assert await job.fetch(name, path=str(job.file)) == job.file.stat().st_size
            added = await job.ask(name, lambda one: one.store_add(job.identity, "members", 1))
            assert added == str(count).encode()


def test_a_role_that_does_not_read_its_answers_keeps_no_other_out() -> None:
    servicer = SnapshotsServicer(cast(Any, None), cast(Any, None))
    one, other = Role("stage", 1), Role("stage", 2)
    with contextlib.ExitStack() as fetching:
        for _ in range(MAX_FETCHING_EACH):
            fetching.enter_context(servicer._one_more(one))
        with pytest.raises(BusyError, match="stage 1 fetches 16 times"), servicer._one_more(one):
            pass
        with servicer._one_more(other):
            pass
    with servicer._one_more(one):
        pass


@in_event_loop
async def test_a_snapshot_is_served_only_to_servers_of_its_stage_and_its_mirror(
    tmp_path: Path, certs: Path
) -> None:
    async with running_job(tmp_path, certs) as job:
        theirs = {"stage_name": "stage0", "step": STEP}
        with pytest.raises(SecurityError, match="stage 1, which may not read snapshots of 'stage0"):
            await job.fetch("stage1", **theirs)
        for name in ("stage0", "spare"):
            assert await job.fetch(name, **theirs) > 0
        for name, number in (("stage0", 0), ("stage9", 9)):
            with pytest.raises(
                SecurityError, match=f"stage {number}, which may not mirror .* only stage 1 may"
            ):
                await job.fetch(name, **MIRROR)
        assert await job.fetch("stage1", **MIRROR) > 0


@in_event_loop
async def test_reads_for_a_past_generation_are_refused(tmp_path: Path, certs: Path) -> None:
    async with running_job(tmp_path, certs) as job:
        for what in ({"stage_name": "stage0", "step": 1}, MIRROR, {"path": "/x"}):
            with pytest.raises(RpcmpError, match="does not belong to generation 0"):
                await job.fetch("driver", **{**what, "generation": 0})


@in_event_loop
async def test_a_relay_connection_has_the_identity_of_its_own_certificate(
    tmp_path: Path, certs: Path
) -> None:
    async with running_job(tmp_path, certs) as job:
        for name, op, member in [
            ("stage9", "connect", "stage1:0"),
            ("stage9", "connect", "driver"),
            ("stage9", "connect", ""),
            ("stage9", "wait", "driver"),
            ("stage1", "connect", "stage0:0"),
            ("stage1", "connect", "driver"),
            ("stage1", "wait", "driver"),
            ("stage1", "wait", "stage1:0"),
            ("driver", "connect", "stage1:0"),
            ("driver", "other", "driver"),
            ("stage1", "other", "stage1:0"),
            ("spare", "wait", "driver"),
        ]:
            assert await hangs_up(job, name, op, member), (name, op, member)


async def hangs_up(job: Job, name: str, op: str, member: str) -> bool:
    """Return whether stage 0's server closes a connection that starts with these bytes."""
    dialer = Dialer(Security(job.certs / name))
    end = await dialer.open(job.cluster.servers[0].address, RELAY, 0)
    try:
        await end.write_message({**job.identity, "op": op, "from": member})
        await asyncio.wait_for(end.read(1), 10)
    except (EOFError, ConnectionError):
        return True
    finally:
        end.abort()
    return False


@in_event_loop
async def test_a_member_cannot_join_under_another_name(tmp_path: Path, certs: Path) -> None:
    async with running_job(tmp_path, certs) as job:
        for key, value in [
            ("addrs/stage0:0", b"uv://127.0.0.1:1"),
            ("addrs/driver", b"x"),
            ("names/0", b"stage0:0"),
            ("memory of stage0:0", b"[1, 2, 3]"),
        ]:
            for call in (
                lambda client: client.store_set(job.identity, key, value),  # noqa: B023
                lambda client: client.store_compare_set(job.identity, key, b"", value),  # noqa: B023
            ):
                with pytest.raises(SecurityError, match="may not join job 'secret-job' as"):
                    await job.ask("stage1", call)


@in_event_loop
async def test_only_a_driver_records_a_drivers_state_and_reads_it(
    tmp_path: Path, certs: Path
) -> None:
    async def requests() -> AsyncIterator[pb.RecordRequest]:
        yield pb.RecordRequest(**job.identity, about="forged")

    async with running_job(tmp_path, certs) as job:
        for name in ("stage0", "stage1", "stage9", "spare"):
            for call in (lambda one: one.recall(), lambda one: one.record(requests())):
                with pytest.raises(SecurityError, match=r"only a driver may call /rpcmp\.v1\.Con"):
                    await job.ask(name, call)
        held = await job.ask("driver", lambda client: client.recall())
        assert (held.job, held.job_id) == ("secret-job", job.identity["job_id"])
        assert held.about not in ("", "forged")
