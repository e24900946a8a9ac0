"""A process of a benchmark's peer: builds and trains on request, and blocks in between.

benchmark ──PeerConfig───> peer
          ──build(way)──>       ──built or refused──> benchmark
          ──run(steps)──>       ──ran───────────────> benchmark
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Literal, Protocol

from rpcmp.config.importing import explain_error
from rpcmp.config.schema import Config
from rpcmp.config.types import Strict
from rpcmp.errors import JobError, RpcmpError, UnsupportedJobError, to_wire
from rpcmp.process.channel import Message, connect_to_supervisor

Kind = Literal["one-process", "torch-pipelining", "stage-times"]


class PeerConfig(Strict):
    """Configuration of one process of a peer; travels as JSON.

    Attributes:
        config, halves: see `Case`.
        folder: of the user's Python files; empty if there are none.
        rank, world_size: its place among the peer's processes.
        store: path of the file through which the processes find each other.
    """

    kind: Kind
    config: Config
    halves: Config
    folder: str
    rank: int
    world_size: int
    store: str


class PeerTrainer(Protocol):
    """A way to train a job; `rpcmp.tools.bench.peer_trainers` has the implementations."""

    def build(self, way: str) -> None:
        """Build the model anew, as before its first step, to be trained in this way.

        Raises:
            UnsupportedJobError: the job cannot be trained in this way.
        """

    def run(self, steps: int) -> Message:
        """Train the next `steps` mini-batches; returns what to report."""


def main() -> None:
    # First of all, and torch is imported after it: a supervisor that dies meanwhile must not leave
    # a process behind.
    channel = connect_to_supervisor().channel
    if (message := channel.receive()) is None:
        return
    config = PeerConfig.model_validate(message)
    try:
        trainer = _create(config)
        while message := channel.receive():
            channel.send(_answer(trainer, message))
    except Exception as error:
        text = f"{config.kind} (rank {config.rank}): {explain_error(error)}"
        known = error if isinstance(error, RpcmpError) else JobError(text)
        channel.send({"event": "error", "error": to_wire(known)})
    os._exit(0)  # without exit handlers, which wait for other processes that may be gone


def _create(config: PeerConfig) -> PeerTrainer:
    if config.folder:
        sys.path.insert(0, config.folder)
    from rpcmp.tools.bench import peer_trainers

    if config.kind == "one-process":
        return peer_trainers.OneProcess(config)
    if config.kind == "stage-times":
        return peer_trainers.StageClock(config)
    return peer_trainers.TorchRank(config)


def _answer(trainer: PeerTrainer, message: Message) -> Message:
    if message["op"] == "run":
        return {"event": "ran", **trainer.run(message["steps"])}
    try:
        gc.collect()  # torch's schedules are cycles: the model built before is still in memory
        trainer.build(message["way"])
    except UnsupportedJobError as error:
        return {"event": "refused", "reason": str(error)}
    return {"event": "built"}


if __name__ == "__main__":
    main()
