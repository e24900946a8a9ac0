"""Who is compared: ours, and the peers by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rpcmp.bench.cases import Case
from rpcmp.bench.contestant import Contestant
from rpcmp.bench.peers.group import PeerGroup, Processes
from rpcmp.bench.peers.order import ONE_PROCESS_WAYS
from rpcmp.bench.pipeline import Pipeline
from rpcmp.errors import ConfigError

BEST_SCHEDULES = ["1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]


def _one_thread(case: Case) -> Contestant:
    return _one_process("one-process-1-thread", case, 1)


def _all_threads(case: Case) -> Contestant:
    return _one_process("one-process-all-threads", case, len(os.sched_getaffinity(0)))


def _one_process(name: str, case: Case, threads: int) -> Contestant:
    processes = Processes("one-process", case, [threads])
    return PeerGroup(name, processes, "batch", ONE_PROCESS_WAYS, {"threads": threads})


def _torch_1f1b(case: Case) -> Contestant:
    return _torch("torch-1f1b", case, ["1f1b"])


def _torch_best(case: Case) -> Contestant:
    return _torch("torch-best", case, BEST_SCHEDULES)


def _torch(name: str, case: Case, schedules: list[str]) -> Contestant:
    threads = [case.config.stage(index).threads for index in range(case.num_stages)]
    processes = Processes("torch-pipelining", case, threads)
    return PeerGroup(name, processes, "schedule", schedules)


OURS = "rpcmp"

CONTESTANTS: dict[str, Callable[[Case], Contestant]] = {
    OURS: Pipeline,
    "one-process-1-thread": _one_thread,
    "one-process-all-threads": _all_threads,
    "torch-1f1b": _torch_1f1b,
    "torch-best": _torch_best,
}
"""Everybody by name."""


def contestants(case: Case, peers: Sequence[str] | None = None) -> list[Contestant]:
    """Ours, and then the `peers` by name; by default the case's own choice, else everybody.

    Raises:
        ConfigError: there is nobody of that name.
    """
    chosen = peers if peers is not None else case.peers or list(CONTESTANTS)
    for name in (*chosen, OURS):
        if name not in CONTESTANTS:
            raise ConfigError(f"no contestant {name!r}; there are {', '.join(CONTESTANTS)}")
    return [CONTESTANTS[name](case) for name in dict.fromkeys((OURS, *chosen))]
