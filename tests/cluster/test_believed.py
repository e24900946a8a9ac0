"""The checks of a supervisor on messages and memory from its children and other servers.

Malformed messages of children are in tests/controlplane/test_recovery.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.checkpoint.files import beneath
from rpcmp.checkpoint.slots import NUM_SLOTS, Slots
from rpcmp.errors import CheckpointError, JobError, RpcmpError, UnreachableError, from_wire
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.process import resources
from rpcmp.process.activity import Activity
from rpcmp.process.channel import parse
from rpcmp.server import moved_layers, snapshot_transfer
from rpcmp.server.connection import machine
from rpcmp.server.snapshot_store import SnapshotStore, save_snapshot
from rpcmp.server.snapshot_transfer import Mirror, receive, receive_file
from rpcmp.v1 import control_pb2 as pb
from tests.support.eventloops import in_event_loop
from tests.support.processes import running_servers


def request(fds: list[int], pid: int = 0) -> pb.MirrorRequest:
    return pb.MirrorRequest(
        supervisor_pid=pid or os.getpid(),
        snapshot_fds=fds,
        snapshot_inodes=[os.fstat(fd).st_ino for fd in fds],
    )


def test_a_mirror_opens_only_memory_files_of_snapshots(tmp_path: Path) -> None:
    slots = Slots.create()
    opened = snapshot_transfer._open(request(list(slots.fds)))
    assert opened is not None
    opened.close()
    path = tmp_path / "file"
    path.write_bytes(b"kept" * 4096)
    with path.open("r+b") as file:
        for fds in (
            [file.fileno()] * (1 + NUM_SLOTS),
            [*slots.fds[:-1], file.fileno()],
            list(slots.fds[:-1]),
            list(reversed(slots.fds)),
            [*slots.fds, slots.fds[-1]],
        ):
            assert snapshot_transfer._open(request(fds)) is None
    assert path.read_bytes() == b"kept" * 4096
    other = [os.memfd_create("rpcmp-other") for _ in range(1 + NUM_SLOTS)]
    assert snapshot_transfer._open(request(other)) is None
    for fd in other:
        os.close(fd)
    slots.close()


@pytest.mark.parametrize(
    ("size", "parts", "why"),
    [
        (10, [bytes(8), bytes(8)], "more than 10 bytes"),
        (10, [bytes(8)], "only 8 of 10 bytes"),
        (1001, [], "more than the memory that is left on this host"),
    ],
)
def test_a_snapshot_must_have_its_announced_size(
    size: int, parts: list[bytes], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved_layers, "free_memory", lambda: 1000)

    async def stream() -> AsyncIterator[pb.FetchResponse]:
        yield pb.FetchResponse(step=1, size=size)
        for part in parts:
            yield pb.FetchResponse(data=part)

    slots = Slots.create()
    with pytest.raises(UnreachableError, match=why):
        asyncio.run(receive(stream(), slots))
    assert slots.all() == []
    assert max(os.fstat(slots.fd(index)).st_size for index in range(len(slots))) <= 10
    slots.close()


@pytest.mark.parametrize(
    ("size", "parts", "why"),
    [
        (10, [bytes(8)] * 1000, "more than 10 bytes of .* have arrived"),
        (10, [bytes(8)], "only 8 of 10 bytes"),
        (2**60, [bytes(8)], "No space left on device"),
    ],
)
def test_a_file_must_have_its_announced_size(
    tmp_path: Path, size: int, parts: list[bytes], why: str
) -> None:
    left = iter(parts)

    async def stream() -> AsyncIterator[bytes]:
        for part in left:
            yield part

    place = beneath(tmp_path, str(tmp_path / "saved" / "file"))
    with pytest.raises((UnreachableError, CheckpointError), match=why):
        asyncio.run(receive_file(stream(), place, size))
    assert len([*left]) >= len(parts) - 3  # it has not been read to its end
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_a_snapshot_header_is_read_within_bounds(tmp_path: Path) -> None:
    slots = Slots.create()
    fd = slots.fd(0)
    data = (2**27).to_bytes(8, "little") + b"[" * 2**20
    os.ftruncate(fd, 2**27 + 8)
    os.pwrite(fd, data, 0)
    snapshot = slots.commit(0, 1, 2**27 + 8)
    saved = save_snapshot(slots, snapshot, "a", beneath(tmp_path, str(tmp_path / "job")))
    assert "header has" in saved.error
    slots.close()


def test_a_truncated_snapshot_is_an_error(tmp_path: Path) -> None:
    slots = Slots.create()
    about = json.dumps({"__metadata__": {"rpcmp": json.dumps({"groups": [], "scheduler": None})}})
    data = len(about).to_bytes(8, "little") + about.encode()
    os.pwrite(slots.fd(0), data, 0)
    for length, error in ((2**23, "memory has been cut off"), (len(data), "")):
        place = beneath(tmp_path, str(tmp_path / "job"))
        saved = save_snapshot(slots, slots.commit(0, 1, length), "a", place)
        assert saved.error.endswith(error)
        assert bool(saved.error) == bool(error)
    (file,) = tmp_path.rglob("*.safetensors")
    assert file.read_bytes() == data
    assert saved.sha256 == hashlib.sha256(data).hexdigest()
    slots.close()


def test_memory_of_a_server_that_is_not_a_neighbour_is_not_opened() -> None:
    async def opened_of(pid: int, address: str) -> bool:
        wanted = request(list(slots.fds), pid)
        wanted.machine, wanted.address = machine(), address
        found = await snapshot_transfer.open_memory(wanted, Dialer(Security()))
        if found is not None:
            found.close()
        return found is not None

    slots = Slots.create()
    with running_servers(1) as (server,), socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)

        async def accepting() -> bool:
            asyncio.get_running_loop().add_reader(listener, accept)
            return await opened_of(os.getpid(), f"127.0.0.1:{listener.getsockname()[1]}")

        accepted: list[socket.socket] = []

        def accept() -> None:
            accepted.append(listener.accept()[0])

        assert asyncio.run(accepting())
        assert not asyncio.run(opened_of(os.getpid(), server.address))
        accepted[0].close()
    assert not asyncio.run(opened_of(os.getpid(), server.address))
    slots.close()


def test_shared_memory_cannot_be_truncated() -> None:
    fd = resources.shared_memory("test", 4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


GARBAGE = st.binary(min_size=40, max_size=40)


@given(GARBAGE)
def test_any_bytes_in_shared_memory_give_a_readable_message(garbage: bytes) -> None:
    fd = resources.shared_memory("test", mmap.PAGESIZE)
    os.pwrite(fd, garbage, 0)
    doing = pb.Doing(**Activity(fd).read()._asdict())
    assert 0.0 <= doing.seconds <= time.monotonic()
    os.close(fd)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"type": 1}',
        '{"type": []}',
        '{"type": "JobError", "fields": {"no": 1}}',
        '{"type": "InterruptedJobError", "fields": {"signum": "a", "step": 1}}',
        "[" * 60_000,
    ],
)
def test_a_malformed_error_of_a_child_is_shown_verbatim(text: str) -> None:
    error = from_wire(text)
    assert isinstance(error, JobError)
    assert repr(text[:50])[:-1] in str(error)


@pytest.mark.parametrize("line", [b"[" * 60_000, b"{}", b"[]", b'{"event": []}', b"\xff", b""])
def test_a_line_that_is_no_message_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(line)
    assert len(str(caught.value)) < 200


def test_a_mirror_takes_only_steps_that_come_next() -> None:
    async def stream(step: int) -> AsyncIterator[pb.FetchResponse]:
        yield pb.FetchResponse(step=step, size=0)

    slots = Slots.create()
    for step in (0, 2, 3):
        with pytest.raises(UnreachableError, match=f"step {step} has arrived, and one after 3"):
            asyncio.run(receive(stream(step), slots, after=3))
    assert asyncio.run(receive(stream(4), slots, after=3)).step == 4
    slots.close()


def test_a_mirror_writes_no_more_checkpoints_than_its_own_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However many a neighbour says that it saves."""

    async def save() -> None:
        store = SnapshotStore(Dialer(Security()))
        await store.open("job", beneath(tmp_path, str(tmp_path)))
        await store.prepare("stage0", None, 1)
        store._saves_mirror = True
        slots = Slots.create()
        mirror = cast(Mirror, SimpleNamespace(slots=slots, stage_name="stage1"))
        data = (2).to_bytes(8, "little") + b"{}"
        for step in range(1, 6):
            slot = slots.reserve()
            assert slot is not None
            os.pwrite(slots.fd(slot), data, 0)
            await store._save_copy(mirror, slots.commit(slot, step, len(data), pin=True))
        slots.close()
        await store.clear()

    asyncio.run(save())
    assert caplog.text.count("saves more often than this one") == 3


class Lying:
    """A client of a server that answers with another snapshot than it is asked for."""

    def __init__(self, *_: Any) -> None:
        pass

    async def __aenter__(self) -> Lying:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def fetch(self, request: pb.FetchRequest) -> AsyncIterator[pb.FetchResponse]:
        yield pb.FetchResponse(step=0, size=0)


@in_event_loop
async def test_another_servers_word_drops_no_snapshot_that_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rpcmp.server.snapshot_store.StageClient", Lying)
    store = SnapshotStore(Dialer(Security()))
    await store.open("job", "no folder")
    store.stage_name = "stage0"
    for step in (10, 11):
        slot = store.slots.reserve()
        assert slot is not None
        store.slots.commit(slot, step, 0)
    wanted = pb.Restore(step=12, address="127.0.0.1:1")
    with pytest.raises(RpcmpError, match=r"\(0, 0\) has arrived, and \(12, 0\) was asked for"):
        await store.prepare("stage0", wanted, 2, 0)
    assert [snapshot.step for snapshot in store.slots.all()] == [10, 11]
    await store.clear()
