"""Snapshots from memory to a disk. The worker goes on meanwhile; its slot is pinned until then.

One after the other, on a thread that yields to all others: a disk is never in as much of a hurry as
the stages that compute on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import threading
from concurrent.futures import ThreadPoolExecutor

from rpcmp.checkpoint import files
from rpcmp.checkpoint.folder import name_of
from rpcmp.checkpoint.inside import Inside, require_plain
from rpcmp.checkpoint.ranges import MAX_HEADER
from rpcmp.errors import CheckpointError, one_line
from rpcmp.snapshot.slots import Slots, Snapshot
from rpcmp.v1 import control_pb2 as pb

Kept = Inside | str
"""The folder of a job's checkpoints, or why it has none here."""


class Disk:
    """Writes snapshots, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rpcmp-saving", initializer=_yield_to_others)

    async def save(
        self, slots: Slots, snapshot: Snapshot, stage_name: str, folder: Kept
    ) -> pb.Saved:
        """Write a snapshot into the checkpoint of its step, and unpin it; what became of it.

        Args:
            folder: of the run's checkpoints, or why there is none.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, _save, slots, snapshot, stage_name, folder)


def file_of(stage_name: str) -> str:
    """The name of a stage's file in a step folder.

    Raises:
        CheckpointError: the stage's name leads elsewhere.
    """
    name = f"{stage_name}.safetensors"
    require_plain(name)
    return name


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _save(slots: Slots, snapshot: Snapshot, stage_name: str, folder: Kept) -> pb.Saved:
    saved = pb.Saved(step=snapshot.step, file=file_of(stage_name), host=platform.node())
    path = f"{folder}/{name_of(snapshot.step)}/{saved.file}"
    try:
        if isinstance(folder, str):
            raise CheckpointError(folder)
        place = folder / name_of(snapshot.step) / saved.file
        memory = slots.fd(snapshot.slot)
        saved.state = _about(memory)
        written = files.copy_durably(place, memory, snapshot.length)
        saved.sha256, saved.size = written.sha256, written.size
        if not slots.holds(snapshot):
            saved.error = f"{path} was overwritten in memory while it was written"
    except OSError as error:
        saved.error = f"cannot write {path}: {error.strerror or error}"
    except CheckpointError as error:
        saved.error = str(error)
    except Exception as error:  # somebody waits to hear of it
        saved.error = f"cannot save {path}: {one_line(error)}"
    finally:
        slots.unpin(snapshot)
    return saved


def _about(memory: int) -> str:
    """Learning rates and scheduler of a snapshot, from its file's metadata.

    Args:
        memory: descriptor of the file's bytes.
    """
    length = int.from_bytes(os.pread(memory, 8, 0), "little")
    if length > MAX_HEADER:  # a worker may have written anything there
        raise ValueError(f"its header has {length} bytes")
    about = json.loads(json.loads(os.pread(memory, length, 8))["__metadata__"]["rpcmp"])
    return json.dumps({key: about[key] for key in ("groups", "scheduler")})
