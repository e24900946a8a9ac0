"""The child's end of the channel to its supervisor: JSON messages, one a line, over a socket pair.

When the supervisor closes its end, or dies, the child has to exit too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
import threading
from typing import Any, NamedTuple

from rpcmp.process.activity import Activity, enable_stack_dumps
from rpcmp.process.interpreter import STOP_SIGNALS
from rpcmp.process.logging import capture
from rpcmp.process.logging.capture import Sender
from rpcmp.process.memory_access import MemoryFinder
from rpcmp.process.resources import name_leftovers

Message = dict[str, Any]

_PR_SET_PDEATHSIG = 1


class Channel:
    """Sends and receives messages. Any thread may send; one thread receives."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lines = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message; exits the process if the supervisor is gone."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            os._exit(1)

    def receive(self) -> Message | None:
        """Return the next message; None if the supervisor is gone."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        message: Message | None = json.loads(line) if line.endswith(b"\n") else None
        return message


class ChildContext(NamedTuple):
    """What a child shares with its supervisor.

    Attributes:
        activity: where this process records what it is doing.
        log: sends what its Python code prints and logs.
        memory: finds the memory of other processes.
        fds: further inherited descriptors.
    """

    channel: Channel
    activity: Activity
    log: Sender
    memory: MemoryFinder
    fds: list[int]


def parse(line: bytes) -> Message:
    """Parse a line that a child has sent.

    Raises:
        ValueError: it is not a message; the child's memory is corrupt, or its code is malicious.
    """
    try:
        message = json.loads(line)
    except RecursionError as error:  # brackets without end
        raise ValueError("a message is nested too deep") from error
    if not isinstance(message, dict) or not isinstance(message.get("event"), str):
        raise ValueError("a message has no event")
    return message


def connect_to_supervisor() -> ChildContext:
    """Set up this process as a child that `Child.spawn` has started.

    The supervisor decides when a child ends. So the child ignores a Ctrl-C or a `systemctl stop`
    that reaches all processes, and the kernel ends it if the supervisor dies without a word.
    """
    fd, parent_pid, stacks, memory, log_socket, held, lender, *fds = map(int, sys.argv[1:])
    for inherited in (fd, stacks, memory, log_socket, held, lender):
        os.set_inheritable(inherited, False)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(parent_pid, signal.SIGKILL)
    name_leftovers()
    enable_stack_dumps(stacks)
    activity = Activity(memory)
    log = Sender(log_socket, held, lambda: activity.read().step)
    capture.start(log)
    return ChildContext(Channel(fd), activity, log, MemoryFinder(lender), fds)


def die_with_parent(parent_pid: int, signum: signal.Signals) -> None:
    """Request `signum` for when the parent's spawning thread ends.

    Linux only; on other systems the channel's end tells.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:  # it has ended before
        os._exit(1)


def continue_without(line: socket.socket) -> None:
    """Have the kernel continue this process, should it be stopped, once the other end has closed.

    A stopped process would not see any other signal of `die_with_parent` than SIGKILL. Whatever
    arrives on the line continues it as well.
    """
    with contextlib.suppress(OSError):  # a sandbox may refuse it
        fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
