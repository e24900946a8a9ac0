"""A process that has one thing to do for its supervisor: the other side of `Child.ask`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rpcmp.config.importing import explain_error
from rpcmp.errors import JobError, RpcmpError, to_wire
from rpcmp.process.channel import Channel, Message


def run_task(channel: Channel, do: Callable[[Message], Message]) -> None:
    """Do it, and answer; the process ends here, or with its supervisor.

    Args:
        do: returns the answer to what the supervisor asks for.
    """
    message = channel.receive()
    threading.Thread(target=_exit_with_supervisor, args=[channel], daemon=True).start()
    try:
        if message is not None:
            channel.send(do(message))
    except Exception as error:
        known = error if isinstance(error, RpcmpError) else JobError(explain_error(error))
        channel.send({"event": "error", "error": to_wire(known)})
    os._exit(0)


def _exit_with_supervisor(channel: Channel) -> None:
    while channel.receive() is not None:
        pass
    os._exit(1)
