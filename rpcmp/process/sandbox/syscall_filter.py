"""A seccomp filter: refuse system calls that an attacker needs and a confined process does not.

It covers what Landlock does not see: sockets that lead to other processes of the user (D-Bus,
docker, an ssh-agent, rpcmp's own), file modes and owners by name, limits, priorities and processors
of other processes. It also refuses what is not needed and has had holes: namespaces, mounts, bpf,
io_uring, keys, 32-bit calls. A refused call fails with EPERM, or with ENOSYS if libraries have a
fallback for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Machine(NamedTuple):
    """A processor's system call ABI.

    Attributes:
        audit: the kernel's identifier of its 64-bit ABI.
        numbers: of the system calls that it has, by name.
    """

    audit: int
    numbers: Mapping[str, int]


REFUSED = tuple(
    """
    ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp userfaultfd keyctl add_key
    request_key bpf perf_event_open mount umount2 pivot_root chroot unshare setns move_mount
    open_tree open_tree_attr fsopen fsconfig fsmount fspick mount_setattr kexec_load
    kexec_file_load init_module finit_module delete_module reboot swapon swapoff acct
    open_by_handle_at name_to_handle_at chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat
    truncate setxattr fsetxattr lsetxattr setxattrat removexattr fremovexattr lremovexattr
    removexattrat file_setattr utime utimes futimesat utimensat setsid setpgid
    shmget shmat shmctl mq_open mq_unlink msgget msgsnd msgrcv msgctl semget semop semctl semtimedop
    inotify_init inotify_init1 fanotify_init process_madvise process_mrelease migrate_pages
    move_pages
    """.split()  # noqa: SIM905
)
"""Refused with EPERM. A file's owner may change its mode, owner and times even through a read-only
descriptor. A process that could leave its group would outlive its job. Shared memory of System V
and queues are no files. Notifications would reveal the names of files that may not be opened, and
when they are used."""

REPORTED_MISSING = ["io_uring_setup", "io_uring_enter", "io_uring_register", "clone3"]
"""Refused with ENOSYS. The filter cannot see the flags of clone3; glibc then calls clone."""

_NUMBERS = """
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_getfd 438 438,
    kcmp 312 272, userfaultfd 323 282, keyctl 250 219, add_key 248 217, request_key 249 218,
    bpf 321 280, perf_event_open 298 241, mount 165 40, umount2 166 39, pivot_root 155 41,
    chroot 161 51, unshare 272 97, setns 308 268, move_mount 429 429, open_tree 428 428,
    open_tree_attr 467 467, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
    mount_setattr 442 442, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105,
    finit_module 313 273, delete_module 176 106, reboot 169 142, swapon 167 224, swapoff 168 225,
    acct 163 89, open_by_handle_at 304 265, name_to_handle_at 303 264, chmod 90 -,
    fchmodat 268 53, fchmodat2 452 452, chown 92 -, lchown 94 -, fchownat 260 54, truncate 76 45,
    setxattr 188 5, lsetxattr 189 6, setxattrat 463 463, removexattr 197 14, lremovexattr 198 15,
    removexattrat 466 466, file_setattr 469 469, io_uring_setup 425 425, io_uring_enter 426 426,
    io_uring_register 427 427, clone3 435 435, socket 41 198, socketpair 53 199, clone 56 220,
    ioctl 16 29, prlimit64 302 261, seccomp 317 277, fchmod 91 52, fchown 93 55,
    fsetxattr 190 7, fremovexattr 199 16, utime 132 -, utimes 235 -, futimesat 261 -,
    utimensat 280 88, setsid 112 157, setpgid 109 154, shmget 29 194, shmat 30 196,
    shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, semget 64 190,
    semop 65 193, semctl 66 191, semtimedop 220 192, inotify_init 253 -, inotify_init1 294 26,
    fanotify_init 300 262, process_madvise 440 440, process_mrelease 448 448,
    migrate_pages 256 238, move_pages 279 239, setpriority 141 140, ioprio_set 251 30,
    sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
    sched_setattr 314 274, fcntl 72 25, mq_open 240 180, mq_unlink 241 181
"""
"""The number of each call on x86-64 and on 64-bit ARM; "-" if it does not exist there."""


def _numbers(column: int) -> dict[str, int]:
    rows = [row.split() for row in _NUMBERS.split(",")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


MACHINES = {
    "x86_64": Machine(0xC000003E, _numbers(1)),
    "aarch64": Machine(0xC00000B7, _numbers(2)),
}

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_REFUSE = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_ACCEPT = (_RETURN, 0, 0, _ALLOW)
_NUMBER_AT, _ABI_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000
_SOCKET_TYPE = 0xF
_IOPRIO_WHO_PROCESS = 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FS_SETFLAGS, _FS32_SETFLAGS, _FS_SETXATTR = 0x40086602, 0x40046602, 0x401C5820
_FS_SETVERSION, _FS_VERITY, _FS_ENCRYPTION = 0x40087602, 0x40806685, 0x800C6613
_SETLEASE, _NOTIFY = 1024, 1026
_SET_FILTER, _ALL_THREADS, _GET_ACTION = 1, 1, 2

Instruction = tuple[int, int, int, int]
"""Classic BPF: operation, jumps if true and if false, operand."""

_LIBC = ctypes.CDLL(None, use_errno=True)


def is_available() -> bool:
    """Return whether the kernel has seccomp filters and this processor's call numbers are known."""
    machine = MACHINES.get(platform.machine())
    if machine is None or sys.maxsize < 2**32:
        return False
    action = ctypes.c_uint32(_ERRNO)
    result: int = _LIBC.syscall(machine.numbers["seccomp"], _GET_ACTION, 0, ctypes.byref(action))
    return result == 0


def install() -> None:
    """Filter the system calls of all threads of this process, and of what it starts, for good."""
    machine = MACHINES[platform.machine()]
    instructions = bpf_program(machine)
    code = b"".join(struct.pack("=HBBI", *each) for each in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    number = machine.numbers["seccomp"]
    if _LIBC.syscall(number, _SET_FILTER, _ALL_THREADS, header):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def bpf_program(machine: Machine) -> list[Instruction]:
    """Return the filter: one block per call, which ends with a verdict or is jumped over."""
    instructions: list[Instruction] = [
        (_LOAD, 0, 0, _ABI_AT),
        (_EQUAL, 1, 0, machine.audit),
        _REFUSE,
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32),
        _REFUSE,
    ]
    verdicts = {
        **dict.fromkeys(REFUSED, errno.EPERM),
        **dict.fromkeys(REPORTED_MISSING, errno.ENOSYS),
    }
    blocks = {name: [(_RETURN, 0, 0, _ERRNO | code)] for name, code in verdicts.items()}
    for name, block in {**blocks, **_by_argument()}.items():
        if name in machine.numbers:
            instructions += [(_EQUAL, 0, len(block), machine.numbers[name]), *block]
    return [*instructions, _ACCEPT]


def _by_argument() -> dict[str, list[Instruction]]:
    """Filter blocks of the calls that are refused for some arguments only."""
    inet, inet6, netlink = socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK
    return {
        # A Unix socket that can be connected leads to services by their names. SOCK_SEQPACKET is
        # allowed: hardly any service listens on it, and CUDA's driver creates one for itself.
        "socket": [
            (_LOAD, 0, 0, _argument(0)),
            (_EQUAL, 7, 0, inet),
            (_EQUAL, 6, 0, inet6),
            (_EQUAL, 5, 0, netlink),
            (_EQUAL, 0, 3, socket.AF_UNIX),
            (_LOAD, 0, 0, _argument(1)),
            (_AND, 0, 0, _SOCKET_TYPE),
            (_EQUAL, 1, 0, socket.SOCK_SEQPACKET),
            _REFUSE,
            _ACCEPT,
        ],
        # A datagram socket can be connected again, to another peer.
        "socketpair": [
            (_LOAD, 0, 0, _argument(1)),
            (_AND, 0, 0, _SOCKET_TYPE),
            (_EQUAL, 2, 0, socket.SOCK_STREAM),
            (_EQUAL, 1, 0, socket.SOCK_SEQPACKET),
            _REFUSE,
            _ACCEPT,
        ],
        "clone": [
            (_LOAD, 0, 0, _argument(0)),
            (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
            _REFUSE,
            _ACCEPT,
        ],
        # The first two insert input into the terminal that the server was started from. The others
        # change a file's attributes through a descriptor for reading, as chmod would.
        "ioctl": _refused_for(
            1,
            (
                *(_TIOCSTI, _TIOCLINUX, _FS_SETFLAGS, _FS32_SETFLAGS, _FS_SETXATTR),
                *(_FS_SETVERSION, _FS_VERITY, _FS_ENCRYPTION),
            ),
        ),
        # A lease stops others who open the file; notifications are inotify's, in an older form.
        "fcntl": _refused_for(1, (_SETLEASE, _NOTIFY)),
        # Of the calling thread, which is 0, and of no other process.
        "setpriority": _allowed_for(os.PRIO_PROCESS, 0),
        "ioprio_set": _allowed_for(_IOPRIO_WHO_PROCESS, 0),
        "prlimit64": _allowed_for(0),
        "sched_setaffinity": _allowed_for(0),
        "sched_setscheduler": _allowed_for(0),
        "sched_setparam": _allowed_for(0),
        "sched_setattr": _allowed_for(0),
    }


def _refused_for(index: int, values: Sequence[int]) -> list[Instruction]:
    """Return a block that refuses a call whose argument is one of these values."""
    last = len(values) - 1
    tests = [(_EQUAL, last - n, int(n == last), value) for n, value in enumerate(values)]
    return [(_LOAD, 0, 0, _argument(index)), *tests, _REFUSE, _ACCEPT]


def _allowed_for(*first: int) -> list[Instruction]:
    """Return a block that refuses a call unless its first arguments are these values."""
    block: list[Instruction] = [_REFUSE, _ACCEPT]
    for index, value in reversed([*enumerate(first)]):
        to_refusal = len(block) - 2
        is_last = index == len(first) - 1
        block = [
            (_LOAD, 0, 0, _argument(index)),
            (_EQUAL, 1 if is_last else 0, 0 if is_last else to_refusal, value),
            *block,
        ]
    return block


def _argument(index: int) -> int:
    """Offset of the lower half of an argument on a little-endian processor."""
    return _ARGUMENTS_AT + 8 * index
