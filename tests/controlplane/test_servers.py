"""Stage servers: one job at a time, of its own stage and software, whatever clients send."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpcmp.errors import BusyError, ConfigError, UnreachableError, VersionError
from rpcmp.job.server_calls import drain
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from rpcmp.server.services import PREFIX
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub, RendezvousStub, SnapshotsStub
from tests.support.controlplane.cluster import Cluster, Server, in_event_loop, reference
from tests.support.fuzz import http2

UNUSED = "127.0.0.1:1"


@in_event_loop
async def test_a_busy_server_names_the_other_job_and_does_not_disturb_it(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.hold(6, lambda: cluster.run.error)
        driving = asyncio.create_task(cluster.drive(cluster.config()))
        await cluster.until(lambda: cluster.run.step == 5)
        refused = await cluster.drive(cluster.config("name=second"))
        assert isinstance(refused.error, BusyError)
        assert "busy with job 'job'" in str(refused.error)
        assert (await driving).committed == reference()


@in_event_loop
async def test_an_unreachable_server_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StageClient.connect, "__defaults__", (3.0,))
    async with Cluster(tmp_path) as cluster:
        first, _ = cluster.servers
        run = await cluster.drive(cluster.config(), connect=[first.address, UNUSED])
        assert isinstance(run.error, UnreachableError)
        assert f"stage 'stage1' at {UNUSED} does not answer" in str(run.error)
        assert first.state == "idle"


@in_event_loop
async def test_a_server_for_another_stage_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        swapped = [server.address for server in reversed(cluster.servers)]
        run = await cluster.drive(cluster.config(), connect=swapped)
        assert isinstance(run.error, ConfigError)
        assert "serves stage 1 replica 0, not stage 0" in str(run.error)


@in_event_loop
async def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path, stages=1) as cluster:
        address = cluster.servers[0].address
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            await cluster.serve(0, address)


@in_event_loop
async def test_a_server_ends_when_it_is_drained(tmp_path: Path) -> None:
    async with Cluster(tmp_path, stages=1) as cluster:
        (server,) = cluster.servers
        await drain(server.address, False, Security())
        await server.ending


@in_event_loop
async def test_health_answers_for_each_service(tmp_path: Path) -> None:
    async with Cluster(tmp_path, stages=1) as cluster, channel_to(cluster.servers[0]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "rpcmp.v1.Control", "rpcmp.v1.Rendezvous"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert (await stub.Check(request)).status == serving
        with pytest.raises(grpc.RpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="nonsense"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def channel_to(server: Server) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(server.address)


@in_event_loop
async def test_other_versions_are_refused_and_named(tmp_path: Path) -> None:
    async with Cluster(tmp_path, stages=1) as cluster:
        (server,) = cluster.servers
        async with cluster.client(server) as client:
            versions = (await client.connect()).versions
            versions.torch, versions.python = "1.13.0", "3.8"
            request = pb.PrepareRequest(job="j", job_id="1", generation=1, versions=versions)
            with pytest.raises(VersionError) as refused:
                await client.prepare(request)
        assert "1.13.0 there" in str(refused.value)
        assert "3.8 there" in str(refused.value)


@in_event_loop
async def test_a_message_of_a_past_generation_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path, 1) as cluster, cluster.client(cluster.servers[0]) as client:
        with pytest.raises(BusyError, match="generation 3"):
            await client.stop(pb.StopRequest(job_id="old", generation=3))


@in_event_loop
async def test_a_servers_log_has_its_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lines(event: str) -> list[str]:
        return [text for text in caplog.messages if event in text]

    caplog.set_level(logging.INFO, "rpcmp.server.stage_server")
    async with Cluster(tmp_path, stages=1) as cluster:
        await cluster.drive(cluster.config(), lost_at=5)
        (lost,) = lines("job 'job' is lost")
        assert lost.endswith("its driver has interrupted it, or is gone; held for 600 s")
        await cluster.drive(cluster.config(), start="fresh")
        assert len(lines("job 'job' claims this server, from 127.")) == 2
        assert len(lines("job 'job' releases this server")) == 1


@in_event_loop
async def test_a_method_name_that_is_not_utf_8_stops_neither_server_nor_other_calls(
    tmp_path: Path,
) -> None:
    """The name stops the grpc.aio server that receives it, which serves only that connection."""
    unknown = http2.opening() + http2.request("/rpcmp.v1.Control/Describe", 1)
    unknown = unknown.replace(b"Describe", b"Describ\xe5")
    async with Cluster(tmp_path, stages=1) as cluster:
        for _ in range(3):
            reader, writer = await connected(cluster.servers[0])
            writer.write(unknown)
            assert await reader.read(9)
            async with cluster.client(cluster.servers[0]) as client:
                assert (await client.connect()).stage_index == 0
            writer.close()


async def connected(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.rpartition(":")
    return await asyncio.open_connection(host, int(port), family=socket.AF_INET)


@in_event_loop
async def test_an_unreadable_message_is_an_invalid_argument(tmp_path: Path) -> None:
    async with Cluster(tmp_path, stages=1) as cluster:
        for method in ("Control/Prepare", "Control/Watch", "Snapshots/Fetch", "Snapshots/Put"):
            for data in (b"\xff\xff\xff", b"\x0b" * 5000):
                reader, writer = await connected(cluster.servers[0])
                writer.write(http2.opening() + http2.call(f"/rpcmp.v1.{method}", data))
                answer = b""
                while b"grpc-status" not in answer and (part := await reader.read(65536)):
                    answer += part
                assert b"the message cannot be read" in answer, method
                writer.close()


@in_event_loop
async def test_other_processes_of_the_user_cannot_bypass_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, such as a worker with a job's code, finds no socket behind the port.

    tests/unit/server/test_hardened_grpc.py tests a socket that is found while it is created.
    """
    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        monkeypatch.setattr(tempfile, "tempdir", folder)
        async with Cluster(tmp_path, 1) as cluster, channel_to(cluster.servers[0]) as channel:
            await ControlStub(channel).Describe(pb.DescribeRequest())  # the connection is open
            (private,) = [name for name in os.listdir(folder) if name.startswith(PREFIX)]
            assert os.listdir(Path(folder, private)) == []


@in_event_loop
async def test_an_invalid_request_of_a_member_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path, stages=1) as cluster, channel_to(cluster.servers[0]) as channel:
        rendezvous, snapshots = RendezvousStub(channel), SnapshotsStub(channel)
        is_done = False

        async def put() -> None:
            await snapshots.Put(iter(()))

        async def fetch(path: str) -> None:
            async for _ in snapshots.Fetch(pb.FetchRequest(**job, path=path)):
                pass

        cluster.hold(3, lambda: is_done)
        driving = asyncio.create_task(cluster.drive(cluster.config(steps=4)))
        await cluster.until(lambda: cluster.run.step == 2)
        async with cluster.client(cluster.servers[0]) as client:
            job_id = (await client.connect()).holdings_of
        job: dict[str, Any] = {"job_id": job_id, "generation": 1}
        await rendezvous.Set(pb.SetRequest(**job, key="text", value=b"abc"))
        long = pb.SetRequest(**job, key="k", value=bytes(40_000))
        nonsense: list[tuple[Callable[[], Awaitable[object]], str]] = [
            (lambda: rendezvous.Get(pb.GetRequest(**job)), "no question for 0 keys"),
            (lambda: rendezvous.Add(pb.AddRequest(**job, key="text", amount=1)), "no number"),
            (lambda: rendezvous.Set(long), "takes no"),
            (lambda: fetch("a\0b"), "is not in"),
            (lambda: fetch("/etc/passwd"), "is not in"),
            (put, "holds nothing of the job"),
        ]
        for call, why in nonsense:
            with pytest.raises(grpc.RpcError) as error:
                await call()
            assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert why in (error.value.details() or "")
        is_done = True
        assert (await driving).committed == reference(4, layers=2)
