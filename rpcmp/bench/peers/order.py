"""What a peer's process is told at its start; travels as JSON."""

from __future__ import annotations

from typing import Literal

from rpcmp.config import Config
from rpcmp.kinds import Strict

WHOLE_BATCH = "whole batch"

ONE_PROCESS_WAYS = [WHOLE_BATCH, "micro-batches"]
"""How the unsplit model may be trained."""

Kind = Literal["one-process", "torch-pipelining", "stage-times"]


class Order(Strict):
    """One process of a peer.

    Attributes:
        kind: what it does.
        config, halves: the case's.
        folder: of the user's Python files; empty where there are none.
        rank, world_size: its place among the peer's processes.
        store: path of a file through which they find each other.
    """

    kind: Kind
    config: Config
    halves: Config
    folder: str
    rank: int
    world_size: int
    store: str
