"""Calls of functions in a fork of a shared fork server: a process with torch and one thread.

A process that runs tests has had threads, such as gRPC's, so a fork of it may deadlock.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from rpcmp.process.fork_client import MAX_BYTES
from tests.support import processes
from tests.support.sharedforks import DRIVE, ask_for_fork


def in_a_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module by name in a fork; return its result, as JSON has it.

    Raises:
        AssertionError: the function raised an error, which the message contains, or the process
            ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with processes.FORKS.line_of(DRIVE) as line, ours:
        with theirs:
            ask_for_fork(line, __name__, theirs.fileno())
        ours.send(json.dumps([function.__module__, function.__name__, *arguments]).encode())
        reply = json.loads(ours.recv(MAX_BYTES) or '["its process ended"]')
    assert len(reply) == 2, reply[0]
    return reply[1]


def main() -> None:
    """Run as the fork."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    module, name, *arguments = json.loads(channel.recv(MAX_BYTES))
    try:
        reply = ["", getattr(importlib.import_module(module), name)(*arguments)]
    except BaseException:
        reply = [traceback.format_exc()[-MAX_BYTES // 4 :]]
    with contextlib.suppress(OSError):  # the parent may be gone
        channel.send(json.dumps(reply).encode())
    os._exit(0)  # no destructors: threads of torch's may still be about


if __name__ == "__main__":
    main()
