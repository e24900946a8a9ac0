"""The template: a process that has imported what a stage server needs, and forks servers.

    rpcmp drive ──arguments, descriptors──> template ──clone──> stage server, a child of `drive`
                <──pid, or error───────────

An interpreter that imports all that takes 0.3 s of a core, a fork 0.02. A forked server equals one
that was started: its parent is `drive`, which gets its exit code and takes it along. The template
may die, and no server does. It has one thread and no connections: these would not survive a fork.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from setproctitle import setproctitle

from rpcmp.process.channel import die_with_parent
from rpcmp.process.interpreter import STOP_SIGNALS
from rpcmp.process.sandbox.syscall_filter import MACHINES

MAX_BYTES = 64 * 1024
MAX_FDS = 8

_PR_GET_TID_ADDRESS = 40
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000

_LIBC = ctypes.PyDLL(None, use_errno=True)  # unlike CDLL it keeps Python's lock, as os.fork does


def fork_sibling() -> int:
    """Fork this process, which must have one thread, as another child of our parent.

    Returns the process id, or 0 in the child. libc's fork, and so os.fork, knows no CLONE_PARENT.
    Hence its system call is made here, between what Python does before and after it. If there is
    one thread, all else that libc does is to have its number written where libc keeps it.

    Raises:
        OSError: the system refuses it, or this cannot be done here.
    """
    machine, address = MACHINES.get(platform.machine()), _thread_id_address()
    if machine is None or not address:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if len(os.listdir("/proc/self/task")) > 1:  # of a profiler, say, that every interpreter loads
        raise OSError(errno.EBUSY, "it has other threads")
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    # Processors differ in which of the last two is the address; the other one is not read.
    arguments = (machine.numbers["clone"], flags, 0, 0, address, address)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _LIBC.syscall(*map(ctypes.c_long, arguments))
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    if pid < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pid


def _thread_id_address() -> int:
    """Return where libc keeps the number of the first thread; 0 if that is unknown."""
    address = ctypes.c_void_p()
    if _LIBC.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) or not address.value:
        return 0
    return address.value if ctypes.c_int.from_address(address.value).value == os.getpid() else 0


class ForkTemplate:
    """Forks processes that run the `main` of a module.

    Args:
        line: to our parent, which orders them.
        stop_handlers: of the stop signals, in the processes that we fork.
    """

    def __init__(
        self, line: socket.socket, module: str, stop_handlers: Mapping[signal.Signals, Any]
    ) -> None:
        self._line, self._module, self._stop_handlers = line, module, stop_handlers

    def run(self) -> NoReturn:
        """Fork until the line ends."""
        while True:
            data, fds, flags, _ = socket.recv_fds(self._line, MAX_BYTES, MAX_FDS)
            if not data:
                sys.exit()
            try:
                if flags & socket.MSG_CTRUNC:  # the kernel has dropped descriptors
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                # A signal must find the handlers of a child, or wait for them.
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
                pid = fork_sibling()
            except OSError as error:
                answer: dict[str, Any] = {"error": str(error)}
            else:
                if not pid:
                    self._run_child(json.loads(data), fds)
                answer = {"pid": pid}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            for fd in fds:
                os.close(fd)
            self._line.send(json.dumps(answer).encode())

    def _run_child(self, message: dict[str, Any], fds: list[int]) -> NoReturn:
        """Run as an interpreter does that our parent has started."""
        self._line.close()
        os.setsid()
        for signum, handler in self._stop_handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        output, permit, *more = fds
        os.dup2(output, 1)
        os.close(output)
        arguments = [*message["arguments"]]
        for option, fd in zip(message["options"], more, strict=True):
            arguments += [option, str(fd)]
        setproctitle(" ".join(["rpcmp", *arguments]))
        del os.environ["SPT_NOENV"]
        if not os.read(permit, 1):  # our parent has died, or does not know us
            os._exit(1)
        os.close(permit)
        sys.argv = ["rpcmp", *arguments]
        importlib.import_module(self._module).main()
        sys.exit()


def main() -> NoReturn:
    """Serve the line whose descriptor is the first argument.

    Further arguments: the parent's process id, the module to run, and modules to import before.
    """
    fd, parent_pid, module, *modules = sys.argv[1:]
    os.set_inheritable(int(fd), False)
    stop_handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(int(parent_pid), signal.SIGKILL)
    gc.disable()  # what is imported stays
    for each in (module, *modules):
        importlib.import_module(each)
    gc.freeze()  # collections would touch, and so copy, the memory that all share
    gc.enable()
    ForkTemplate(socket.socket(fileno=int(fd)), module, stop_handlers).run()


if __name__ == "__main__":
    main()
