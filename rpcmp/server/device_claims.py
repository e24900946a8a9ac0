"""Devices of this host that workers have, so that two jobs never choose the same by chance.

Each server holds an abstract Unix socket per worker, whose name says what the worker has:

    @rpcmp-device/GPU/JOB/PID

GPU is the unique id of the device, since what is cuda:0 to one worker may be cuda:1 to another, of
a server that was started with another CUDA_VISIBLE_DEVICES; or its name, where it has no id.

The kernel lists such names for all users, whichever of them binds them, and drops them when the
server ends. So there is nothing to clean up and no file to protect, and a stranger who binds such
names only makes jobs share a device. Containers with a network of their own do not see each other's
names: `rpcmp serve --device`, or what a container sees of the host's devices, keeps them apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from rpcmp.config.device_places import ID

PREFIX = "rpcmp-device"

MOST_CANDIDATES = 1024

CHOOSING = f"\0{PREFIX}"
"""Bound by the server that chooses at the moment."""

CHOOSING_SECONDS = 5.0
"""After which a server chooses although another one seems to."""

Holding = tuple[str, str]
"""What stands for a device, and the digest of the job that has it."""


def choose(
    candidates: Sequence[str], may_share: bool, job: str, held: Sequence[Holding]
) -> tuple[str, bool]:
    """Return the device that a worker gets, and whether another job has it, too.

    Args:
        candidates: what stands for the device that it should have, and for others that would do.
        may_share: whether other workers of its job should have the same.
    """
    theirs = {device for device, other in held if other != job}
    taken = {device for device, _ in held}
    first, *others = candidates
    if first not in (theirs if may_share else taken):
        return first, False
    free = next((device for device in others if device not in taken), first)
    return free, free in theirs


class DeviceClaim:
    """The device that this server's worker has, from `choose` to `release`.

    Args:
        job_id: of the worker's job; only its digest is visible to others.
    """

    def __init__(self, job_id: str) -> None:
        self._job = hashlib.sha256(job_id.encode()).hexdigest()[:16]
        self._held: socket.socket | None = None

    async def choose(self, candidates: object, may_share: bool) -> tuple[str, bool]:
        """Choose a device and hold it; see the function `choose`.

        Raises:
            ValueError: these are no names of devices.
        """
        names = _checked(candidates)
        self.release()
        with await _alone():
            device, is_shared = choose(names, may_share, self._job, [*_held()])
            # An ID is so short that the name fits the 107 bytes that there are.
            self._held = _bind(f"\0{PREFIX}/{device}/{self._job}/{os.getpid()}")
        return device, is_shared

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def _checked(candidates: object) -> list[str]:
    """Return the names that a worker has sent, whose code is the job's."""
    names = candidates if isinstance(candidates, list) else []
    are_good = all(isinstance(name, str) and ID.fullmatch(name) for name in names)
    if not are_good or not 0 < len(names) <= MOST_CANDIDATES:
        raise ValueError("a worker's devices have no names or ids")
    return names


def _held() -> Iterator[Holding]:
    """Yield what all workers of this host have, by the kernel's list of Unix sockets."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
            words = line.rpartition("@")[2].split("/")
            if len(words) == 4 and words[0] == PREFIX:
                yield words[1], words[2]


async def _alone() -> contextlib.AbstractContextManager[object]:
    """Return a block in which no other server of the host chooses."""
    ends = asyncio.get_running_loop().time() + CHOOSING_SECONDS
    while (own := _bind(CHOOSING)) is None:
        if asyncio.get_running_loop().time() > ends:
            return contextlib.nullcontext()
        await asyncio.sleep(0.01)
    return own


def _bind(name: str) -> socket.socket | None:
    """Hold a name; None if it is held already, or the kernel has no such names."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(name)
    except OSError:
        held.close()
        return None
    return held
