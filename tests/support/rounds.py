"""Headers of rounds, and a compute thread, for tests of one stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpcmp.config.topology import ReplicaAssignment, ReplicaShare
from rpcmp.pipelining.schedule import InFlightLimits, policy
from rpcmp.rpc.messages import Mode, RoundHeader
from rpcmp.worker.executor import ComputeThread

ALL_BUNDLES = ReplicaShare(ReplicaAssignment([1]), 0)
"""The share of a stage without further replicas."""


def header(number: int = 1, num_microbatches: int = 1, **keys: Any) -> RoundHeader:
    """Return a round's header with one sample per micro-batch and one micro-batch per bundle."""
    usual = RoundHeader(number, 1, Mode.TRAIN, num_microbatches, num_microbatches, per_message=1)
    return usual._replace(**keys)


def compute_thread(
    schedule: str,
    limits: InFlightLimits = InFlightLimits(4, 4),  # noqa: B008
    after_round: Callable[[RoundHeader], None] = lambda header: None,
) -> ComputeThread:
    return ComputeThread(policy(schedule), limits, ALL_BUNDLES, lambda header: None, after_round)
