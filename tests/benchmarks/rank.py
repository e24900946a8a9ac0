"""One process of a contestant: does steps on request, and blocks in between.

    benchmark ──order──> rank ──ready──> benchmark        once
    benchmark ──steps──> rank ──begin, end, losses──> benchmark

The kinds are in dataparallel.py and exchange.py.
"""

from __future__ import annotations

import os
from typing import Protocol

from rpcmp.process.channel import Message, connect_to_supervisor


class Rank(Protocol):
    """Work of one process."""

    def run(self, steps: int) -> Message:
        """Do `steps` steps.

        Returns:
            "begin" and "end", of `time.monotonic_ns`, and "losses": of each step, this rank's part
            of it; empty where nothing is trained.
        """


def main() -> None:
    """Serve the benchmark; the process ends here."""
    channel = connect_to_supervisor().channel  # before torch
    from rpcmp.config.importing import explain_error
    from rpcmp.errors import JobError, RpcmpError, to_wire

    try:
        if (order := channel.receive()) is not None:
            rank = _create(order)
            channel.send({"event": "ready"})
            while message := channel.receive():
                channel.send({"event": "ran", **rank.run(message["steps"])})
    except Exception as error:
        known = error if isinstance(error, RpcmpError) else JobError(explain_error(error))
        channel.send({"event": "error", "error": to_wire(known)})
    os._exit(0)  # without what else waits for other processes: they may be gone


def _create(order: Message) -> Rank:
    from tests.benchmarks.dataparallel import DataParallel
    from tests.benchmarks.exchange import AllReduce, Sum

    kinds: dict[str, type[DataParallel | AllReduce | Sum]] = {
        "data-parallel": DataParallel,
        "all-reduce": AllReduce,
        "sum": Sum,
    }
    return kinds[order["kind"]](order)


if __name__ == "__main__":
    main()
