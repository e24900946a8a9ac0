"""Which replica takes how many micro-batches, where the config leaves that to us.

Measured once, by training: whatever makes a replica slow, its processor, its device, its neighbours
on the same host, shows there and nowhere else. Nothing of these steps is kept. What was found
belongs to the job from then on, since it decides which gradients are summed where: it is in every
manifest, and a run that is resumed takes it from there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rpcmp import inflight
from rpcmp.checkpoint.runs import newest_in
from rpcmp.config import Config
from rpcmp.errors import ConfigError
from rpcmp.job.segments import Segments
from rpcmp.process.forking import Forks
from rpcmp.turns import by_speed

WARM_STEPS = 1
"""Before the measurement: memory and code that are touched for the first time."""

MEASURED_STEPS = 3


async def with_shares(config: Config, connect: Sequence[str] | None, forks: Forks) -> Config:
    """The job with `shares` for all stages that have replicas.

    Args:
        config: the job, with its balance.
        connect: addresses of running stage servers; see Fleet.
        forks: where processes come from.

    Raises:
        ConfigError: there is no `[data]` to train on.
        RpcmpError: the job fails.
    """
    wanted = [
        index
        for index, stage in enumerate(config.stages)
        if stage.num_replicas > 1 and stage.shares is None
    ]
    if not config.balance_replicas or not wanted:
        return config
    if config.data is None:
        raise ConfigError(
            "balance_replicas = true trains some steps to measure the replicas, and the job has no "
            "[data]; give their stages `shares`"
        )
    busy = await _busy_seconds(config, connect, forks)
    return config.with_shares({index: _shares(config, index, busy) for index in wanted})


def shares_of_before(config: Config) -> Config:
    """The job with the `shares` of the newest checkpoint, where they are to be measured.

    Raises:
        CheckpointError: the folder of the checkpoints cannot be read.
    """
    if not config.balance_replicas:
        return config
    run = newest_in(config.checkpoint_folder, config.name)
    before: Any = run.newest.config.get("stages") if run and run.newest else None
    found = {
        index: then["shares"]
        for index, (now, then) in enumerate(zip(config.stages, before or (), strict=False))
        if now.shares is None and len(then.get("shares") or ()) == now.num_replicas
    }
    return config.with_shares(found)


async def _busy_seconds(
    config: Config, connect: Sequence[str] | None, forks: Forks
) -> dict[str, float]:
    """In which each worker computes in a step, by its label."""
    segments = Segments(config.without_schedulers(), connect, forks=forks)
    try:
        await segments.start()
        await segments.run(WARM_STEPS)
        return (await segments.run(MEASURED_STEPS)).busy_seconds
    finally:
        await segments.close()


def _shares(config: Config, index: int, busy: dict[str, float]) -> list[int]:
    count = inflight.num_bundles(config)
    turns = config.stage(index).turns
    mine = [worker for worker in config.workers if worker.stage_index == index]
    bundles = [len(turns.numbers(worker.replica, count)) for worker in mine]
    measured = [busy[w.label] / number for w, number in zip(mine, bundles, strict=True) if number]
    unknown = statistics.mean(measured)  # of replicas that had nothing to do
    found = iter(measured)
    return by_speed([next(found) if number else unknown for number in bundles], count)
