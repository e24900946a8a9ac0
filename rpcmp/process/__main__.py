"""The fork server: a process that has imported torch, and forks children that need not.

    supervisor ──fork: module, descriptors──> fork server ──fork──> child, runs the module
               <──started: pid, or failed─────     │ <─────────────── ends
               <──ended: pid, exit code───────     │
               ──adopt: another line──────────>    └── the children of a line end with it
               ──network, address, socket, listener────>  what the supervisor needs of their network

Importing torch takes two seconds of a core, a fork some milliseconds; and all children share the
memory of what was imported. The server imports and does nothing else: a lock that another thread
held, or a GPU's driver, would not survive a fork.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from setproctitle import setproctitle

from rpcmp.process.channel import die_with_parent
from rpcmp.process.interpreter import STOP_SIGNALS, kill_group
from rpcmp.process.resources import MULTIPROCESSING, remove_semaphores, sweep
from rpcmp.process.sandbox import confinement, namespace
from rpcmp.process.sandbox.confinement import FileAccess

MAX_BYTES = 64 * 1024
MAX_FDS = 64


class ForkServer:
    """Forks children for the supervisors that have a line to it.

    Args:
        first: the line of the supervisor that has started it; the server ends with it.
    """

    def __init__(self, first: socket.socket) -> None:
        self._first = first
        self._pid = os.getpid()
        self._children: dict[int, socket.socket] = {}
        self._lines = selectors.DefaultSelector()
        self._lines.register(first, selectors.EVENT_READ)
        self._signals, wakeup = socket.socketpair()
        for end in (self._signals, wakeup):
            end.setblocking(False)
        self._wakeup = wakeup
        self._lines.register(self._signals, selectors.EVENT_READ)
        signal.set_wakeup_fd(wakeup.fileno())
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)

    def run(self) -> NoReturn:
        """Serve until the first line ends."""
        while True:
            for key, _ in self._lines.select():
                if key.fileobj is self._signals:
                    self._signals.recv(MAX_BYTES)
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    self._handle(key.fileobj)

    def _handle(self, line: socket.socket) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(line, MAX_BYTES, MAX_FDS)
        except ConnectionError:
            data, fds, flags = b"", [], 0
        if not data:
            self._close(line)
            return
        message = json.loads(data)
        if flags & socket.MSG_CTRUNC:  # the kernel has dropped descriptors, and says no more
            _close_all(fds)
            # Who wanted us to adopt a line sees its end: the kernel has closed ours.
            if message["op"] == "fork":
                _send(line, {"event": "failed", "error": os.strerror(errno.EMFILE)})
            return
        match message["op"]:
            case "fork":
                self._fork(line, message, fds)
            case "adopt":
                self._lines.register(socket.socket(fileno=fds[0]), selectors.EVENT_READ)
            case "network":
                here = namespace.current
                network = {"name": here.name, "is_private": here.is_private, "reason": here.reason}
                _send(line, {"event": "network", **network})
            case "namespaces":
                socket.send_fds(line, [b'{"event": "namespaces"}'], namespace.current.namespaces)
            case "address":
                _add_address(line, message["rank"])
            case "socket":
                _send_socket(line, namespace.current.connectable)
            case "listener":
                _send_socket(line, namespace.current.listener)

    def _fork(self, line: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            pid = os.fork()
        except OSError as error:  # no more processes, no memory
            _close_all(fds)
            _send(line, {"event": "failed", "error": str(error)})
            return
        if not pid:
            self._run_child(message, fds)
        with contextlib.suppress(OSError):  # the child was faster, and has done so itself
            os.setpgid(pid, pid)
        _close_all(fds)
        self._children[pid] = line
        _send(line, {"event": "started", "pid": pid})

    def _run_child(self, message: dict[str, Any], fds: list[int]) -> NoReturn:
        """Run the module's `main` as `Child.spawn` would run the module in an interpreter."""
        os.setpgid(0, 0)  # what the user's code forks is ended together with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._lines.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wakeup.close()
        self._lines.close()
        module, file_access = message["module"], message["file_access"]
        if file_access is not None:  # our own output may be a terminal, see `logging/collector.py`
            output = fds.pop()
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
        channel, *more = fds
        sys.argv = [module, *map(str, (channel, self._pid, *more))]
        setproctitle(module.removesuffix(".process"))
        if file_access is not None:  # before any code that is not ours
            confinement.enter(FileAccess.from_message(file_access), message["scratch"])
        importlib.import_module(module).main()
        sys.exit()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            remove_semaphores(pid)  # the supervisor does so too, unless it has no descriptors left
            line = self._children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            _send(line, {"event": "ended", "pid": pid, "code": code})

    def _close(self, line: socket.socket) -> None:
        """Kill the children of a supervisor that is gone; exit if it was the first one.

        Nobody else sweeps after the children of one that has borrowed a line and was killed.
        """
        is_last = line is self._first
        for pid, owner in self._children.items():
            if is_last or line is owner:
                kill_group(pid)
        if is_last:
            for pid in self._children:
                os.waitpid(pid, 0)
            sweep(MULTIPROCESSING)
            os._exit(0)
        self._lines.unregister(line)
        line.close()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    """Send a message; if the supervisor is gone, `ForkServer._close` will kill its children."""
    with contextlib.suppress(OSError):
        line.send(json.dumps(message).encode())


def _add_address(line: socket.socket, rank: int) -> None:
    """Add an address to our network, which a confined child may not do itself."""
    try:
        namespace.current.add_address(rank)
        _send(line, {"event": "address"})
    except OSError as error:
        _send(line, {"event": "failed", "error": error.strerror or str(error)})


def _send_socket(line: socket.socket, create: Callable[[], socket.socket]) -> None:
    try:
        with create() as created:
            message = json.dumps({"event": "socket"}).encode()
            socket.send_fds(line, [message], [created.fileno()])
    except OSError as error:
        _send(line, {"event": "failed", "error": error.strerror or str(error)})


def main() -> NoReturn:
    """Serve the line whose descriptor is the first argument.

    Further arguments: the parent's process id, descriptors of the namespaces to join ("" to create
    new ones), and modules to import.
    """
    fd, parent_pid, namespaces, *modules = sys.argv[1:]
    shared = [int(each) for each in namespaces.split(",") if each]
    for inherited in (int(fd), *shared):
        os.set_inheritable(inherited, False)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    # Requires a process that has one thread.
    namespace.current = namespace.share(shared) if shared else namespace.open_private()
    die_with_parent(int(parent_pid), signal.SIGKILL)
    gc.disable()  # what is imported stays
    for module in modules:
        importlib.import_module(module)
    tempfile.gettempdir()  # once for all children: it writes a file there and removes it
    gc.freeze()  # collections would touch, and so copy, the memory that all children share
    gc.enable()
    ForkServer(socket.socket(fileno=int(fd))).run()


if __name__ == "__main__":
    main()
