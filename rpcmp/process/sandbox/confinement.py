"""Confinement: limit what a process that runs a job's code may reach on its host.

The process may use the network, compute, and open what a Python process needs, its own temporary
folder and what it was granted. Keys, homes, other users' data and the memory of its supervisor stay
out of reach of any code that runs in it:

    Landlock       files; processes' memory, environment and descriptors; signals
    capabilities   dropped, root's too
    seccomp        system calls that bypass the other two, see `syscall_filter.py`

Confinement starts right after the fork, in a process with one thread, and cannot be undone. What a
kernel does not offer is left out; `missing_protection` reports the consequences.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import glob
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rpcmp import errors
from rpcmp.process.sandbox import landlock, namespace, syscall_filter
from rpcmp.process.sandbox.landlock import Access, grants, private_files

SCRATCH = "rpcmp-scratch-"
"""Prefix of the names of confined processes' temporary folders."""

SYSTEM = ["/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/nix/store", "/etc"]
SYSTEM += ["/proc", "/sys"]
"""Readable for every process, except for entries of /etc and /opt that are not world-readable."""

OPT_DEPTH = 2
"""Levels of /opt that are searched for such entries: it may hold whole systems."""

DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/shm"]
ACCELERATORS = ["/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/dxg", "/dev/accel*"]

HINT = (
    "this process is confined: name the folders that it needs in `[data] paths`, and start the "
    "stage server with `--data DIR`; `serve --no-confine` and `security.confine = false` confine "
    "nothing"
)

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 38, 47
_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True)
class FileAccess:
    """What a confined process may open beyond what every process needs.

    Attributes:
        readable, writable: files and folders.
        hidden: files and folders that stay out of reach, even beneath one that is granted.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()

    def reading(self, *paths: Path | str | None) -> Self:
        more = (str(path) for path in paths if path)
        return dataclasses.replace(self, readable=(*self.readable, *more))

    def writing(self, *paths: Path | str) -> Self:
        return dataclasses.replace(self, writable=(*self.writable, *map(str, paths)))

    def may_read(self, path: str) -> bool:
        """Return whether `path` is one of `readable`, or lies in one."""
        resolved = Path(path).resolve()
        return any(resolved.is_relative_to(Path(folder).resolve()) for folder in self.readable)

    def to_message(self) -> dict[str, Any]:
        """Serialize for `from_message` in another process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, list[str]]) -> Self:
        """Restore what `to_message` has serialized."""
        return cls(**{key: tuple(paths) for key, paths in message.items()})


@dataclass
class _ConfinementState:
    is_confined: bool = False


_state = _ConfinementState()


def is_confined() -> bool:
    return _state.is_confined


def enter(file_access: FileAccess, scratch: str) -> None:
    """Confine this process, which must have one thread."""
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = None
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if landlock.abi():
        hidden = [*file_access.hidden, *private_files("/etc"), *private_files("/opt", OPT_DEPTH)]
        hidden += _secrets_on_path()
        readable = [*SYSTEM, *_interpreter_paths(), *_resolver_paths(), *file_access.readable]
        writable = [*_devices(), scratch, *file_access.writable]
        landlock.restrict(
            [*grants(readable, Access.READ, hidden), *grants(writable, Access.WRITE, hidden)]
        )
    # Without capabilities the process cannot enter its private network any more: a thread that has
    # entered it stays there for the RPC agent.
    namespace.current.stay(_drop_capabilities)
    _drop_capabilities()
    if syscall_filter.is_available():
        syscall_filter.install()
    _state.is_confined = True
    errors.denied_hint = HINT


def _drop_capabilities() -> None:
    """Drop all capabilities of the calling thread: root's, and those in a user namespace."""
    number = 0
    while not _LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
        number += 1
    # EINVAL: that was the last one. EPERM: the process has none to drop.
    if ctypes.get_errno() not in (errno.EINVAL, errno.EPERM):
        _check(-1)
    _check(_LIBC.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0))
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_LIBC.capset(header, bytes(24)))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"giving up capabilities: {os.strerror(number)}")


def kernel_support() -> str:
    """Return what the kernel offers, such as "Landlock ABI 7, seccomp"."""
    version = landlock.abi()
    parts = [f"Landlock ABI {version}" if version else "no Landlock"]
    parts.append("seccomp" if syscall_filter.is_available() else "no seccomp")
    return ", ".join(parts)


def missing_protection() -> str:
    """Return what a confined process can do here that it should not; empty if nothing."""
    missing = []
    version = landlock.abi()
    if not version:
        missing.append("open all files of its user, and its supervisor's memory (no Landlock)")
    elif version < landlock.SCOPES_ABI:
        missing.append(
            f"signal other processes of its user (Landlock ABI {version}, needs "
            f"{landlock.SCOPES_ABI})"
        )
    if not syscall_filter.is_available():
        missing.append("talk to services of its user by Unix sockets (no seccomp filter)")
    return "; ".join(missing)


def hidden_by(certs: Path | None, needed: Path | None = None) -> tuple[str, ...]:
    """Return the paths to hide so that a certificate folder's keys are out of reach.

    Args:
        certs: the folder; if it lies in an authority's folder, that folder is hidden as well.
        needed: a folder that has to stay readable. If it lies in one of these folders, or is one,
            only the keys are hidden.
    """
    if certs is None:
        return ()
    own = certs.resolve()
    folders = [own, *([own.parent] if (own.parent / "ca.key").exists() else [])]
    hidden: list[str] = []
    for folder in folders:
        keys = [*folder.glob("*.key"), *folder.glob("*/tls.key")]
        if needed is not None and needed.resolve().is_relative_to(folder):
            hidden += map(str, keys)
        else:
            hidden.append(str(folder))
        hidden += (os.path.realpath(key) for key in keys if key.is_symlink())
    return tuple(hidden)


SECRET = re.compile(
    r".*\.(key|(?<!cacert\.)pem|p12|pfx|keytab|env)|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|\.env(\..*)?"
    r"|\.(netrc|pgpass|pypirc|npmrc|vault-token|password-store|git|git-credentials|ssh|gnupg|aws)"
    r"|\.(azure|kube|docker|config|huggingface|.*_history)|credentials\.json"
    r"|service[-_]account.*\.json",
    re.IGNORECASE,
)
"""Names of files and folders that a job's code has no business with."""

SECRETS_DEPTH = 3
DATA_ENTRIES = 10_000
"""A folder with more entries has data: folders that come after these are not looked into."""


def secrets_in(folder: Path) -> Iterator[str]:
    """Yield what lies in a granted folder under names of keys and credentials.

    Such are keys of other stages that were put beside a config, or the environment of a service.
    """
    waiting = [(os.path.realpath(folder), SECRETS_DEPTH)]
    while waiting:
        path, depth = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(path) as entries:  # another user's
            for number, entry in enumerate(entries):
                if SECRET.fullmatch(entry.name):
                    yield entry.path
                elif depth > 1 and number < DATA_ENTRIES and entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth - 1))


def has_home(folder: Path | str) -> bool:
    """Whether a folder is the user's home, or has it."""
    home = os.path.realpath(os.path.expanduser("~"))
    return Path(home).is_relative_to(os.path.realpath(folder))


def _interpreter_paths() -> Iterator[str]:
    package = Path(errors.__file__).parent
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, str(package))
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    for path in (*sys.path, *libraries):
        # An empty part of PYTHONPATH means the current directory, which may well be the home.
        if os.path.isabs(path) and not has_home(path):
            yield path


def _secrets_on_path() -> Iterator[str]:
    """Yield what a folder of PYTHONPATH has, or a tree that was installed to be edited."""
    installed = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
    for path in map(os.path.realpath, _interpreter_paths()):
        if not any(Path(path).is_relative_to(each) for each in installed):
            yield from secrets_in(Path(path))


def _resolver_paths() -> Iterator[str]:
    """The folder of /etc/resolv.conf's target, which is replaced whenever a network changes."""
    target = os.path.realpath("/etc/resolv.conf")
    if target.startswith("/run/"):
        yield os.path.dirname(target) if target.count("/") > 2 else target


def _devices() -> Iterator[str]:
    yield from DEVICES
    for pattern in ACCELERATORS:
        yield from glob.glob(pattern)
