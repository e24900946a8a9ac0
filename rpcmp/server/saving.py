"""Snapshots from memory to a disk. The worker goes on meanwhile; its slot is pinned until then."""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from rpcmp.checkpoint import files
from rpcmp.checkpoint.folder import CheckpointFolder
from rpcmp.snapshot.slots import Slots, Snapshot
from rpcmp.v1 import control_pb2 as pb

BLOCK = 2**22


async def save(slots: Slots, snapshot: Snapshot, stage_name: str, folder: str) -> pb.Saved:
    """Write a snapshot into the checkpoint of its step; what became of it.

    Args:
        folder: of all checkpoints.
    """
    path = CheckpointFolder(Path(folder)).path_of(snapshot.step) / f"{stage_name}.safetensors"
    saved = pb.Saved(step=snapshot.step, file=path.name, host=platform.node())
    fd = slots.fd(snapshot.slot)
    try:
        saved.state = _about(fd)
        written = await asyncio.to_thread(files.write_durably, path, _blocks(fd, snapshot.length))
        saved.sha256, saved.size = written.sha256, written.size
    except OSError as error:
        saved.error = f"cannot write {path}: {error.strerror or error}"
    finally:
        slots.unpin(snapshot.slot)
    return saved


def _blocks(fd: int, length: int) -> Iterator[bytes]:
    for offset in range(0, length, BLOCK):
        yield os.pread(fd, min(BLOCK, length - offset), offset)


def _about(fd: int) -> str:
    """Learning rates and scheduler of a snapshot, from its file's metadata."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    header = json.loads(os.pread(fd, length, 8))
    about = json.loads(header["__metadata__"]["rpcmp"])
    return json.dumps({key: about[key] for key in ("groups", "scheduler")})
