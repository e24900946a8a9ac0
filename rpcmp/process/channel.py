"""The child's end of the line to its supervisor: JSON messages, one a line, over a socket pair.

The end of the line is a message as well: the supervisor is gone, and the child has to go too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
from typing import Any, NamedTuple

from rpcmp.process.activity import Activity, write_when_asked
from rpcmp.process.logging import capture
from rpcmp.process.logging.sender import Sender
from rpcmp.process.signals import ENDING

Message = dict[str, Any]

_PR_SET_PDEATHSIG = 1


class Channel:
    """Sends and receives messages. Any thread may send; one thread receives.

    Args:
        fd: the inherited end of the socket pair.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lines = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message; ends the process where nobody is left to read it."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            os._exit(1)

    def receive(self) -> Message | None:
        """The next message; None when the supervisor is gone."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        message: Message | None = json.loads(line) if line.endswith(b"\n") else None
        return message


class ChildContext(NamedTuple):
    """What holds a child and its supervisor together.

    Attributes:
        channel: to the supervisor.
        activity: where this process notes what it does.
        log: what its Python code says.
        fds: what else it was given.
    """

    channel: Channel
    activity: Activity
    log: Sender
    fds: list[int]


def parse(line: bytes) -> Message:
    """What a child's line says.

    Raises:
        ValueError: it is no message; the child's memory is broken, or its code means no good.
    """
    try:
        message = json.loads(line)
    except RecursionError as error:  # it has no end of brackets
        raise ValueError("a message is nested too deep") from error
    if not isinstance(message, dict) or not isinstance(message.get("event"), str):
        raise ValueError("a message says no event")
    return message


def begin_child() -> ChildContext:
    """The bond of this process, which `Child.spawn` has started.

    The supervisor decides when a child ends, so a Ctrl-C or a `systemctl stop` that reaches all
    processes must not end it; and where the supervisor dies without a word, the kernel does.
    """
    fd, parent_pid, stacks, memory, line, held, *fds = map(int, sys.argv[1:])
    for each in (fd, stacks, memory, line, held):
        os.set_inheritable(each, False)
    for signum in ENDING:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(parent_pid, signal.SIGKILL)
    write_when_asked(stacks)
    activity = Activity(memory)
    log = Sender(line, held, lambda: activity.read().step)
    capture.begin(log)
    return ChildContext(Channel(fd), activity, log, fds)


def die_with_parent(parent_pid: int, signum: signal.Signals) -> None:
    """Get `signum` when the parent's spawning thread ends (Linux; elsewhere the channel tells)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:  # it was faster
        os._exit(1)
