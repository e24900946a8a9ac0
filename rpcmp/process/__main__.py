"""The fork server: a process that has imported torch, and forks those that then need not.

    supervisor ──fork: module, descriptors──> fork server ──fork──> child, runs the module
               <──started: pid, or failed─────     │ <─────────────── ends
               <──ended: pid, exit code───────     │
               ──adopt: another line──────────>    └── the children of a line end with it
               ──network, address, socket, listener────>  what the supervisor needs of their network

To import torch takes two seconds of a core, to fork some milliseconds; and what was imported lies
in memory once. It imports and does nothing else: a lock that another thread held, or a GPU's
driver, would not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from setproctitle import setproctitle

from rpcmp.process import confinement, namespace
from rpcmp.process.channel import die_with_parent
from rpcmp.process.confinement import Reach
from rpcmp.process.interpreter import kill_group
from rpcmp.process.signals import ENDING

MAX_BYTES = 64 * 1024
MAX_FDS = 64


class ForkServer:
    """Forks children for whoever has a line to it.

    Args:
        first: the line whose end ends it all.
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
        """Serve until the first line ends; in a child, be the child."""
        while True:
            for key, _ in self._lines.select():
                if key.fileobj is self._signals:
                    self._signals.recv(MAX_BYTES)
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)

    def _hear(self, line: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(line, MAX_BYTES, MAX_FDS)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._end(line)
            return
        message = json.loads(data)
        match message["op"]:
            case "fork":
                self._fork(line, message, fds)
            case "adopt":
                (fd,) = fds
                self._lines.register(socket.socket(fileno=fd), selectors.EVENT_READ)
            case "network":
                here = namespace.current
                told = {"name": here.name, "is_private": here.is_private, "reason": here.reason}
                _tell(line, {"event": "network", **told})
            case "namespaces":
                socket.send_fds(line, [b'{"event": "namespaces"}'], namespace.current.namespaces)
            case "address":
                _add_address(line, message["rank"])
            case "socket":
                _give(line, namespace.current.connectable)
            case "listener":
                host, port = message["host"], message["port"]
                _give(line, lambda: namespace.current.listener(host, port))

    def _fork(self, line: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            pid = os.fork()
        except OSError as error:  # no more processes, no memory
            for fd in fds:
                os.close(fd)
            _tell(line, {"event": "failed", "error": str(error)})
            return
        if not pid:
            self._become(message, fds)
        with contextlib.suppress(OSError):  # it was faster, and has done so itself
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        self._children[pid] = line
        _tell(line, {"event": "started", "pid": pid})

    def _become(self, message: dict[str, Any], fds: list[int]) -> NoReturn:
        """Be the child: as `python -m module CHANNEL PARENT STACKS ACTIVITY LOG HELD MORE...`."""
        os.setpgid(0, 0)  # what the user's code forks is ended together with it
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._lines.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._wakeup.close()
        self._lines.close()
        module, reach = message["module"], message["reach"]
        if reach is not None:  # ours may be a terminal, see `rpcmp.process.logging.receiver`
            output = fds.pop()
            for standard in (1, 2):
                os.dup2(output, standard)
            os.close(output)
        channel, *more = fds
        sys.argv = [module, *map(str, (channel, self._pid, *more))]
        setproctitle(module)
        if reach is not None:  # before any code that is not ours
            confinement.enter(Reach.from_message(reach), message["scratch"])
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        sys.exit()

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            line = self._children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            _tell(line, {"event": "ended", "pid": pid, "code": code})

    def _end(self, line: socket.socket) -> None:
        """A supervisor is gone: its children must not outlive it."""
        for pid, asked_by in self._children.items():
            if line in (asked_by, self._first):
                kill_group(pid)
        if line is self._first:
            os._exit(0)
        self._lines.unregister(line)
        line.close()


def _tell(line: socket.socket, message: dict[str, Any]) -> None:
    """Say something to a supervisor; one that is gone has its children ended by `_end`."""
    with contextlib.suppress(OSError):
        line.send(json.dumps(message).encode())


def _add_address(line: socket.socket, rank: int) -> None:
    """Make an address in our network, which what is forked there may not do if it is confined."""
    try:
        namespace.current.add_address(rank)
        _tell(line, {"event": "address"})
    except OSError as error:
        _tell(line, {"event": "failed", "error": error.strerror or str(error)})


def _give(line: socket.socket, make: Callable[[], socket.socket]) -> None:
    """Give a supervisor a socket of our network."""
    try:
        with make() as made:
            socket.send_fds(line, [json.dumps({"event": "socket"}).encode()], [made.fileno()])
    except OSError as error:
        _tell(line, {"event": "failed", "error": error.strerror or str(error)})


def main() -> NoReturn:
    """Serve the line whose descriptor comes first.

    Then come the parent, descriptors of the namespaces to live in ("": new ones), and modules.
    """
    fd, parent_pid, namespaces, *modules = sys.argv[1:]
    shared = [int(each) for each in namespaces.split(",") if each]
    for each in (int(fd), *shared):
        os.set_inheritable(each, False)
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    # Takes a process that has one thread.
    namespace.current = namespace.share(shared) if shared else namespace.open_private()
    die_with_parent(int(parent_pid), signal.SIGKILL)
    gc.disable()  # what is imported stays
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # collections would touch, and so copy, what all children share
    gc.enable()
    ForkServer(socket.socket(fileno=int(fd))).run()


if __name__ == "__main__":
    main()
