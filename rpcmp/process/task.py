"""Processes that do one task for their supervisor and end with its last answer.

    supervisor ──op and its arguments──> child, `python -m rpcmp.process.task`
               <────────answers─────────

A task needs torch or the user's code, and a supervisor must import neither. Only the supervisor's
own code chooses the op; a message from a peer never does.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping

from rpcmp.errors import JobError, RpcmpError, to_wire
from rpcmp.process.channel import Channel, Message, connect_to_supervisor
from rpcmp.process.child import Child, log_as
from rpcmp.process.fork_client import Forks
from rpcmp.process.sandbox.confinement import FileAccess

TASKS = {
    "cut": "rpcmp.driver.module_cut:cut",
    "sample": "rpcmp.worker.profiler:sample",
    "profile": "rpcmp.worker.profiler:profile",
    "examine": "rpcmp.server.host_facts:check_devices_and_code",
    "count": "rpcmp.tools.explain.model_summary:count",
    "train": "rpcmp.tools.reference_model:train",
}
"""The "module:function" of each op. The function yields its answers to the message it is called
with; it is named by a string because this package may not import those above it."""


async def run_task(
    message: Message,
    environment: Mapping[str, str],
    forks: Forks | None,
    file_access: FileAccess | None,
) -> Message:
    """Do the task `message["op"]` in a child process and return its only answer.

    Args:
        forks: where to fork it; None to start an interpreter.
        file_access: what the job's code may open there; None: it is not confined.
    """
    child = await start_task(message["op"], environment, forks, file_access)
    return await child.ask(message)


async def start_task(
    op: str,
    environment: Mapping[str, str],
    forks: Forks | None,
    file_access: FileAccess | None,
) -> Child:
    """Start a child process for a task; the caller sends it the message with this op."""
    log = log_as(_module(op))
    return await Child.spawn(
        "rpcmp.process.task", environment, file_access, forks=forks, on_line=log
    )


def main() -> None:
    """Do the task that the supervisor asks for; the process ends here, or with its supervisor."""
    # First of all, and torch is imported after it: a supervisor that dies meanwhile must not leave
    # a process behind.
    channel = connect_to_supervisor().channel
    if (message := channel.receive()) is None:
        return
    threading.Thread(target=_exit_with_supervisor, args=[channel], daemon=True).start()
    try:
        _set_title(_module(message["op"]))
        for answer in _function(message["op"])(message):
            channel.send(answer)
    except Exception as error:
        from rpcmp.config.importing import explain_error  # pydantic, which a supervisor lacks

        known = error if isinstance(error, RpcmpError) else JobError(explain_error(error))
        channel.send({"event": "error", "error": to_wire(known)})
    os._exit(0)


def _module(op: str) -> str:
    return TASKS[op].partition(":")[0]


def _function(op: str) -> Callable[[Message], Iterator[Message]]:
    function: Callable[[Message], Iterator[Message]] = getattr(
        importlib.import_module(_module(op)), TASKS[op].partition(":")[2]
    )
    return function


def _set_title(title: str) -> None:
    os.environ.setdefault("SPT_NOENV", "1")  # a title must not be written over the environment
    from setproctitle import setproctitle

    setproctitle(title)


def _exit_with_supervisor(channel: Channel) -> None:
    while channel.receive() is not None:
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
