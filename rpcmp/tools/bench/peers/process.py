"""A process of a peer: builds when told, trains when told, and blocks in between.

benchmark ──build(way)──> peer ──built or refused──> benchmark
benchmark ──run(steps)──> peer ──ran──> benchmark
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Protocol

from rpcmp.config.importing import explain_error
from rpcmp.errors import JobError, RpcmpError, UnsupportedJobError, to_wire
from rpcmp.process.channel import Channel, Message
from rpcmp.tools.bench.peers.trainers import OneProcess, StageClock, TrainerConfig


class PeerTrainer(Protocol):
    """What one process of a peer can do."""

    def build(self, way: str) -> None:
        """Make the model anew, as it was before the first step, to be trained in this way.

        Raises:
            UnsupportedJobError: the job cannot be trained like that.
        """

    def run(self, steps: int) -> Message:
        """Train on; what is to be reported."""


def run(channel: Channel) -> None:
    """Serve the benchmark; the process ends here."""
    message = channel.receive()
    if message is None:
        return
    order = TrainerConfig.model_validate(message)
    try:
        peer = _create(order)
        while message := channel.receive():
            channel.send(_answer(peer, message))
    except Exception as error:
        what = f"{order.kind} (rank {order.rank}): {explain_error(error)}"
        known = error if isinstance(error, RpcmpError) else JobError(what)
        channel.send({"event": "error", "error": to_wire(known)})
    os._exit(0)  # without what else waits for other processes: they may be gone


def _create(order: TrainerConfig) -> PeerTrainer:
    if order.folder:
        sys.path.insert(0, order.folder)
    if order.kind == "one-process":
        return OneProcess(order)
    if order.kind == "stage-times":
        return StageClock(order)
    # The others do without: it imports torch's compiler, for seconds.
    from rpcmp.tools.bench.peers.trainers import TorchRank

    return TorchRank(order)


def _answer(peer: PeerTrainer, message: Message) -> Message:
    if message["op"] == "run":
        return {"event": "ran", **peer.run(message["steps"])}
    try:
        gc.collect()  # torch's schedules are cycles: the way before is still in memory
        peer.build(message["way"])
    except UnsupportedJobError as error:
        return {"event": "refused", "reason": str(error)}
    return {"event": "built"}
