"""Calls of functions in a fork of a shared fork server: a process with torch and one thread.

A process that runs tests has had threads, such as gRPC's, so a fork of it may deadlock.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import sys
import traceback
from collections.abc import Callable

from rpcmp.process.fork_client import MAX_BYTES
from tests.support.processes import FORKS
from tests.support.sharedforks import DRIVE, ask_for_fork

DONE = b"done"


def in_a_fork(function: Callable[..., None], *arguments: str) -> None:
    """Call a function of a module by name in a fork, and wait until it returns.

    Raises:
        AssertionError: the function raised an error, which the message contains, or the process
            ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with FORKS.line_of(DRIVE) as line, ours:
        with theirs:
            ask_for_fork(line, __name__, theirs.fileno())
        ours.send(json.dumps([function.__module__, function.__name__, *arguments]).encode())
        reply = ours.recv(MAX_BYTES)
    assert reply == DONE, reply.decode() or "its process ended"


def main() -> None:
    """Run as the fork."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    module, name, *arguments = json.loads(channel.recv(MAX_BYTES))
    try:
        getattr(importlib.import_module(module), name)(*arguments)
    except BaseException:
        with contextlib.suppress(OSError):  # the parent may be gone
            channel.send(traceback.format_exc().encode()[-MAX_BYTES:])
        raise
    channel.send(DONE)


if __name__ == "__main__":
    main()
