"""A worker's life: build the stage, join the group, serve it, leave.

    supervisor ──start──> worker                       worker ──ready, built, joined──> supervisor
                                                              ──progress──>

A worker joins one group once and never again: torch RPC cannot form a second group inside a living
process, so every generation has fresh ones.
"""

from __future__ import annotations

import os
import sys
import threading

from rpcmp import split, transport
from rpcmp.control.store import GrpcStore
from rpcmp.errors import JobError, RpcmpError, StageError, one_line, to_wire
from rpcmp.factory import explain
from rpcmp.plan import Assignment
from rpcmp.process.channel import Channel, Message
from rpcmp.worker.stage import Stage

LEAVE_SECONDS = 10.0
"""How long a worker waits for the others when the group ends."""

PROGRESS_SECONDS = 0.5
"""Between reports of the step to the supervisor, for `rpcmp status`."""


def run(channel: Channel) -> None:
    """Run one worker; the process ends here."""
    channel.send({"event": "ready"})
    start = channel.receive()
    if start is not None:
        _serve(channel, start)
    os._exit(1)


def _serve(channel: Channel, start: Message) -> None:
    if start["code_folder"]:
        sys.path.insert(0, start["code_folder"])
    assignment = Assignment.model_validate_json(start["assignment"])
    transport.reserve_threads(assignment.in_flight)
    if any(limits.splits for limits in assignment.all_limits):
        split.install()
    threading.Thread(target=_exit_with_supervisor, args=[channel], daemon=True).start()
    try:
        stage = _build(assignment)
        sizes = [parameter.numel() for _, parameter in stage.model.named_parameters()]
        channel.send({"event": "built", "num_parameters": sum(sizes)})
        store = GrpcStore(start["rendezvous"], start["job_id"], start["generation"])
        transport.join(start["members"], start["rank"], store, stage)
    except Exception as error:
        known = error if isinstance(error, RpcmpError) else JobError(explain(error))
        channel.send({"event": "failed", "error": to_wire(known)})
        os._exit(1)
    channel.send({"event": "joined"})
    while not stage.finished.wait(PROGRESS_SECONDS):
        channel.send({"event": "progress", "step": stage.optimizer.steps})
    transport.leave(LEAVE_SECONDS)
    channel.send({"event": "left"})
    os._exit(0)  # no destructors: RPC threads may still be about


def _build(assignment: Assignment) -> Stage:
    try:
        return Stage(assignment)
    except Exception as error:
        text = str(error) if isinstance(error, RpcmpError) else explain(error)
        first, _, rest = text.partition("\n")
        cause = first if isinstance(error, RpcmpError) else one_line(error)
        raise StageError(assignment.stage_name, "build", cause, rest) from error


def _exit_with_supervisor(channel: Channel) -> None:
    while channel.receive() is not None:
        pass
    os._exit(1)
