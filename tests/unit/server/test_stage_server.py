"""What a server keeps of a job, and what it lets a job's code open; all else on real servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from rpcmp.errors import ConfigError, DrainingError
from rpcmp.process.child import Child
from rpcmp.process.fork_client import Forks
from rpcmp.process.sandbox.confinement import FileAccess
from rpcmp.server.admission import Admission
from rpcmp.server.claim import Claim
from rpcmp.server.connection import versions
from rpcmp.server.stage_server import StageServer
from rpcmp.v1 import control_pb2 as pb
from tests.support.eventloops import in_event_loop


def server(tmp_path: Path, file_access: FileAccess | None = None) -> StageServer:
    return StageServer(Admission(0, checkpoints=tmp_path, file_access=file_access), Forks([]))


def prepare(**fields: Any) -> pb.PrepareRequest:
    own = {"job": "job", "job_id": "a", "generation": 1, "driver_id": "one"}
    group = [pb.GroupStage(name="only", replicas=1)]
    return pb.PrepareRequest(**{**own, "versions": versions(), "group": group, **fields})


@in_event_loop
async def test_a_job_that_has_just_claimed_the_server_keeps_its_files(tmp_path: Path) -> None:
    """The time for which the last one was held ends while it does so."""

    made = server(tmp_path)
    files = made._job_folder.open("a")
    async with made._changing:
        made._start_forgetting()
        await asyncio.sleep(0)
        made.claim = cast(Claim, object())
    await made._releasing
    assert files.weights.is_dir()
    made.claim = None
    made._start_forgetting()
    await made._releasing
    assert not files.folder.exists()


@in_event_loop
async def test_a_server_that_is_being_stopped_says_so_to_a_job_that_it_could_not_serve_either(
    tmp_path: Path,
) -> None:
    """A new version of it may take its place: the job should come again."""

    made = server(tmp_path)
    made.draining = True
    with pytest.raises(DrainingError):
        await made.prepare(prepare(versions=pb.Versions(), stage_index=1), "driver")


def test_a_job_may_not_open_what_a_link_leads_to_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a confined worker may open, its server was started with; `init` is only checked."""
    granted, secret, link = (tmp_path / name for name in ("granted", "secret", "link"))
    for folder in (granted, secret):
        folder.mkdir()
    link.symlink_to(granted)
    given: list[FileAccess] = []

    async def spawn(*args: Any) -> Any:
        link.unlink()
        link.symlink_to(secret)
        given.append(args[2])
        raise RuntimeError("it is enough")

    async def claim(made: StageServer, init: Path) -> None:
        with pytest.raises(RuntimeError, match="it is enough"):
            await made.prepare(prepare(init=str(init)), "driver")

    async def run() -> None:
        made = server(tmp_path, FileAccess().reading(granted))
        with pytest.raises(ConfigError, match="does not let jobs read"):
            await made.prepare(prepare(init=str(secret)), "driver")
        monkeypatch.setattr(Child, "spawn", spawn)
        await claim(made, link)
        made._job_folder.clear()

    asyncio.run(run())
    assert given[0].may_read(str(granted))
    assert not given[0].may_read(str(secret))
