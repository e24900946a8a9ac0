"""What a process takes from the system: descriptors, memory, and temporary folders.

The size of shared memory is sealed: a process that reads memory which its peer has cut off ends
with SIGBUS.

Temporary folders are removed with their process, also if it was killed, and only their user can
read them. The process holds a lock on each folder, so that a later process can tell leftovers from
folders in use. A process id in the name would not do: processes in containers may share /tmp, but
each sees only its own ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

ENOUGH = 16_384
"""Descriptors; more than any job needs. A limit of a billion, as some containers have, slows down
programs that close every possible descriptor."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_locks: dict[Path, int] = {}
"""Descriptors of the folders of this process."""


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raise the limit of this process and its children as far as the system allows, up to ENOUGH.

    The default, 1,024, is the limit of select(2), which is not used here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # it works with fewer, too
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def shared_memory(name: str, size: int) -> int:
    """Return the descriptor of fresh memory whose size is sealed."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def is_sealed(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS


MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""Bytes of memory that this host has."""

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def memory_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how many processes the kernel has killed for memory so far.

    In our control group, in either version of them (see cgroups(7)), or on the whole machine.
    """
    for path in (
        *_own_group(proc, cgroups, "memory.events", "memory.oom_control"),
        proc / "vmstat",
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):
            counters = dict(line.split() for line in path.read_text().splitlines())
            return int(counters["oom_kill"])
    return 0


def memory_limit(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes of memory that our control group may use, or those of the machine."""
    limit = MEMORY
    for path in _own_group(proc, cgroups, "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            limit = min(limit, int(path.read_text()))
    return limit


SPARED = 0.1
"""The part of all memory that no peer gets, even if it is free: the worker and its server grow."""


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes of memory that are left for what a peer sends, of our control group's too.

    Files that were read long ago count as free.
    """
    free = memory_limit(proc, cgroups)
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        free = {name: int(size) * 1024 for name, size, *_ in lines}["MemAvailable:"]
    for path in _own_group(proc, cgroups, "memory.max", "memory.limit_in_bytes"):
        used = "memory.current" if path.name == "memory.max" else "memory.usage_in_bytes"
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max" is no number
            lines = (
                line.split() for line in path.with_name("memory.stat").read_text().splitlines()
            )
            cached = {name: int(size) for name, size in lines}["inactive_file"]
            left = int(path.read_text()) - int(path.with_name(used).read_text()) + cached
            free = min(free, left)
    return max(0, free - int(SPARED * memory_limit(proc, cgroups)))


def _own_group(proc: Path, cgroups: Path, second: str, first: str) -> Iterator[Path]:
    """Yield a file of our control group and of those above it.

    Args:
        second, first: its name in version 2 and in version 1.
    """
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" or controllers == "memory":
                root, name = (cgroups, second) if number == "0" else (cgroups / "memory", first)
                group = root / path.lstrip("/")
                while group.is_relative_to(root):
                    yield group / name
                    group = group.parent


MULTIPROCESSING = "rpcmp-mp-"
"""Prefix of the folders of multiprocessing's sockets."""


def name_leftovers() -> None:
    """Let what multiprocessing leaves behind if this process is killed be found by its supervisor.

    It leaves named semaphores and a folder, such as those of torch's data loaders. A process of
    multiprocessing's own removes them, and is killed as well.
    """
    from multiprocessing import current_process  # commands that start nothing need not wait for it

    settings = current_process()._config  # type: ignore[attr-defined]
    settings["semprefix"] = f"/{_semaphores(os.getpid())}"
    settings["tempdir"] = str(create_folder(MULTIPROCESSING))


def _semaphores(pid: int) -> str:
    """Return what semaphores' names begin with; containers that share /dev/shm have own pids."""
    return f"rpcmp-{os.stat('/proc/self/ns/pid').st_ino}-{pid}"


_swept_later: set[int] = set()
"""Processes whose semaphores could not be looked for."""


def remove_semaphores(pid: int) -> None:
    """Remove the semaphores of a process that has called `name_leftovers`."""
    _swept_later.add(pid)
    with contextlib.suppress(OSError):  # no descriptors are left: the next call does it
        for each in list(_swept_later):
            for semaphore in _starting_with("/dev/shm", f"sem.{_semaphores(each)}-"):
                semaphore.unlink(missing_ok=True)
            _swept_later.discard(each)


def _starting_with(folder: str, prefix: str) -> list[Path]:
    """Return what lies in a folder. Since Python 3.13, `Path.glob` would hide an OSError."""
    return [Path(folder) / name for name in os.listdir(folder) if name.startswith(prefix)]


def create_folder(prefix: str) -> Path:
    """Create a temporary folder that `sweep` removes once this process is gone.

    Raises:
        OSError: the system refuses it, for want of space or descriptors.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            _locks[folder] = _lock(folder)
        except (BlockingIOError, FileNotFoundError):  # `sweep` was faster, and took it for one left
            continue
        except OSError:  # no descriptors are left
            folder.rmdir()
            raise
        if folder.exists():
            return folder
        os.close(_locks.pop(folder))  # as above, between opening and locking it


def remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        _remove_all(folder)
    if (fd := _locks.pop(folder, None)) is not None:
        os.close(fd)
        if folder.exists():  # no descriptors were left: there is one now
            with contextlib.suppress(OSError):
                _remove_all(folder)


def sweep(prefix: str) -> None:
    """Remove the unlocked folders with this prefix, which killed processes have left."""
    folders: list[Path] = []
    with contextlib.suppress(OSError):  # no descriptors are left: a later sweep finds them
        folders += _starting_with(tempfile.gettempdir(), prefix)
    for folder in folders:
        with contextlib.suppress(OSError):  # in use, or not a folder
            fd = _lock(folder)
            if os.fstat(fd).st_uid == os.geteuid():  # root could remove another user's, too
                remove_folder(folder)
            os.close(fd)


def _remove_all(folder: Path) -> None:
    """Remove a folder with everything in it.

    shutil.rmtree would not do: a job's code may have nested folders deeper than Python recurses, or
    removed our right to read them. So entries at depth two are moved up until there are none.
    """
    while entries := list(os.scandir(folder)):
        for entry in entries:
            for inner in _content(entry):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)
                    os.rename(inner.path, folder / secrets.token_hex(16))
                else:
                    os.unlink(inner.path)
            (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
    folder.rmdir()


def _content(entry: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    if not entry.is_dir(follow_symlinks=False):
        return []
    os.chmod(entry.path, 0o700)
    return list(os.scandir(entry.path))


def _lock(folder: Path) -> int:
    """Lock a folder; closing the returned descriptor unlocks it.

    Raises:
        OSError: another process holds the lock, or `folder` is a link or not a folder.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd
