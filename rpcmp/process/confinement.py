"""Confinement: what a process that runs a job's code may reach on its host.

It may use the network, compute, and open what a Python process needs, its own temporary folder and
what it was given. Keys, homes, other users' data and the memory of its supervisor stay out of reach
of whatever code runs in it:

    Landlock       files; processes' memory, environment and descriptors; signals
    capabilities   given up, root's too
    seccomp        system calls that lead past the other two, see `rpcmp.process.syscall_filter`

It begins right after the fork, in a process with one thread, and there is no way back. What a
kernel does not offer is left out, and `lacks` says what that means.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rpcmp import errors
from rpcmp.process import landlock, namespace, syscall_filter
from rpcmp.process.grants import Access, grants, private_files

SCRATCH = "rpcmp-scratch-"
"""How the names of confined processes' temporary folders begin."""

SYSTEM = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store", "/etc"]
SYSTEM += ["/proc", "/sys"]
"""Readable for every process, but for what in /etc and /opt not every user may read."""

OPT_DEPTH = 2
"""Folders of /opt that are looked at for such: it may hold whole systems."""

DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm"]
ACCELERATORS = ["/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/dxg", "/dev/accel*"]

HINT = (
    "this process is confined: name the folders that it needs in `[data] paths`, and start the "
    "stage server with `--data DIR`; `serve --no-confine` and `security.confine = false` confine "
    "nothing"
)


@dataclass(frozen=True)
class Reach:
    """What a confined process may open beyond what every one needs.

    Attributes:
        readable, writable: files and folders.
        hidden: what stays out of reach, even beneath one that is not.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    def reading(self, *paths: Path | str | None) -> Self:
        """This and more to read."""
        more = (str(path) for path in paths if path)
        return dataclasses.replace(self, readable=(*self.readable, *more))

    def writing(self, *paths: Path | str) -> Self:
        """This and more to write to."""
        return dataclasses.replace(self, writable=(*self.writable, *map(str, paths)))

    def may_read(self, path: str) -> bool:
        """Whether a file or folder is one of those to read, or lies in one."""
        found = Path(path).resolve()
        return any(found.is_relative_to(Path(folder).resolve()) for folder in self.readable)

    def to_message(self) -> dict[str, Any]:
        """For `from_message` in another process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, list[str]]) -> Self:
        """What `to_message` was made of."""
        return cls(**{key: tuple(paths) for key, paths in message.items()})


@dataclass
class _State:
    is_confined: bool = False


_state = _State()


def is_confined() -> bool:
    """Whether this process is."""
    return _state.is_confined


def enter(reach: Reach, scratch: str) -> None:
    """Confine this process, which has one thread.

    Args:
        reach: what it may open.
        scratch: its folder for temporary files.

    Raises:
        OSError: the kernel refuses what it offers.
    """
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = None
    landlock.gain_none()
    if landlock.abi():
        hidden = [*reach.hidden, *private_files("/etc"), *private_files("/opt", OPT_DEPTH)]
        readable = [*SYSTEM, *_of_interpreter(), *_of_resolver(), *reach.readable]
        writable = [*_devices(), scratch, *reach.writable]
        landlock.restrict(
            [*grants(readable, Access.READ, hidden), *grants(writable, Access.WRITE, hidden)]
        )
    # From here on it could not enter: the thread that has keeps it open for the RPC agent.
    namespace.current.stay(landlock.drop)
    landlock.drop()
    if syscall_filter.is_available():
        syscall_filter.install()
    _state.is_confined = True
    errors.denied_hint = HINT


def told() -> str:
    """Say what the kernel offers: "Landlock ABI 7, seccomp"."""
    version = landlock.abi()
    parts = [f"Landlock ABI {version}" if version else "no Landlock"]
    parts.append("seccomp" if syscall_filter.is_available() else "no seccomp")
    return ", ".join(parts)


def lacks() -> str:
    """Say what a confined process can do here that it should not; empty: nothing."""
    found = []
    version = landlock.abi()
    if not version:
        found.append("open all files of its user, and its supervisor's memory (no Landlock)")
    elif version < landlock.SCOPES_ABI:
        found.append(
            f"signal other processes of its user (Landlock ABI {version}, needs "
            f"{landlock.SCOPES_ABI})"
        )
    if not syscall_filter.is_available():
        found.append("talk to services of its user by Unix sockets (no seccomp filter)")
    return "; ".join(found)


def hidden_by(certs: Path | None, needed: Path | None = None) -> tuple[str, ...]:
    """What must be hidden for the keys of a certificate's folder to be.

    Args:
        certs: the folder; where it lies in that of an authority, this is hidden as well.
        needed: a folder that has to stay readable: if it lies in one of these, or is one, only
            the keys are hidden.
    """
    if certs is None:
        return ()
    own = certs.resolve()
    folders = [own, *([own.parent] if (own.parent / "ca.key").exists() else [])]
    found: list[str] = []
    for folder in folders:
        if needed is not None and needed.resolve().is_relative_to(folder):
            found += map(str, [*folder.glob("*.key"), *folder.glob("*/tls.key")])
        else:
            found.append(str(folder))
        keys = [*folder.glob("*.key"), *folder.glob("*/tls.key")]
        found += (os.path.realpath(key) for key in keys if key.is_symlink())
    return tuple(found)


def _of_interpreter() -> Iterator[str]:
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(__file__).parent.parent))
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    home = os.path.realpath(os.path.expanduser("~"))
    for each in (*sys.path, *libraries):
        # An empty part of PYTHONPATH means the current directory, which may well be the home.
        if os.path.isabs(each) and not _is_in(home, os.path.realpath(each)):
            yield each


def _is_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _of_resolver() -> Iterator[str]:
    """The file that /etc/resolv.conf leads to, which is replaced whenever a network changes."""
    target = os.path.realpath("/etc/resolv.conf")
    if target.startswith("/run/"):
        yield os.path.dirname(target) if target.count("/") > 2 else target


def _devices() -> Iterator[str]:
    yield from DEVICES
    for pattern in ACCELERATORS:
        yield from glob.glob(pattern)
