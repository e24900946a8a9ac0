"""Asking every worker's host how long it takes for each layer.

Hosts are asked side by side, but the servers of one machine one after the other, for they would
slow each other. Stages with equal settings on one machine are measured once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rpcmp.balance.profile import HostProfile, Order
from rpcmp.config import Config
from rpcmp.control.client import StageClient
from rpcmp.control.options import versions
from rpcmp.job import code
from rpcmp.job.calls import all_of
from rpcmp.job.dialing import dialer_of
from rpcmp.job.visit import visiting
from rpcmp.process.forking import Forks
from rpcmp.v1 import control_pb2 as pb

MODULE = ("name", "module", "kwargs", "inputs")
"""The keys of `[[stages]]` that say what a stage is; the others place it and tune it."""


@dataclass(frozen=True)
class Measured:
    """What one worker's host says.

    Attributes:
        machine: equal for servers that share processors.
        profile: all layers, under the stage's settings.
    """

    machine: str
    profile: HostProfile


async def measure(
    config: Config, addresses: Sequence[str], sample: bytes, forks: Forks
) -> list[Measured]:
    """What each worker's host says, in the order of the workers.

    Args:
        config: the job.
        addresses: of running servers, one a worker; none starts servers on this machine.
        sample: inputs and targets of one micro-batch; see `rpcmp.handoff.dumps`.
        forks: where the processes of servers on this machine come from.

    Raises:
        UnavailableError, VersionError, ConfigError: a server cannot be had.
        RpcmpError: a layer fails.
    """
    orders = [_order(config, worker.stage_index) for worker in config.workers]
    equals = [orders.index(order) for order in orders]
    files = code.collect(config.folder) if config.ship_code else []
    dialer = dialer_of(config, addresses)
    async with visiting(config, dialer, addresses, max(equals) + 1, forks) as clients:
        keys = list(zip(await _machines(clients, len(orders)), equals, strict=True))
        first = {key: keys.index(key) for key in keys}
        turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        profiles = await all_of(
            _ask(clients[index], turns[machine], _request(config, index, orders, files, sample))
            for (machine, _), index in first.items()
        )
    by_key = dict(zip(first, profiles, strict=True))
    return [Measured(key[0], by_key[key]) for key in keys]


async def _machines(clients: list[StageClient], count: int) -> list[str]:
    """Each worker's machine. There are fewer servers than workers only where all are here."""
    found = [description.machine for description in await all_of(c.connect() for c in clients)]
    return found + found[:1] * (count - len(found))


async def _ask(client: StageClient, turn: asyncio.Lock, request: pb.ProfileRequest) -> HostProfile:
    async with turn:
        answer = await client.profile(request)
    return HostProfile.model_validate_json(answer.profile)


def _request(
    config: Config, rank: int, orders: list[Order], files: list[pb.CodeFile], sample: bytes
) -> pb.ProfileRequest:
    worker = config.workers[rank]
    job = pb.PrepareRequest(
        job=config.name,
        versions=versions(),
        stage_index=worker.stage_index,
        replica=worker.replica,
        threads=config.stage(worker.stage_index).threads,
        code=files,
        data_paths=config.data_paths,
    )
    return pb.ProfileRequest(job=job, order=orders[rank].model_dump_json(), sample=sample)


def _order(config: Config, index: int) -> Order:
    """All layers with the settings of stage `index`, as one stage: equal for equal stages.

    Where stages are modules of their own they stay, all with these settings.
    """
    settings = config.stage(index)
    unplaced = settings.model_copy(
        update={"addresses": [], "memory": None, "replicas": None, "shares": None}
    )
    if config.model is not None:
        model = config.model.model_copy(update={"balance": None, "num_stages": 1})
        stages = [unplaced.model_copy(update={"name": None})]
    else:
        model = None
        stages = [
            unplaced.model_copy(update={key: getattr(stage, key) for key in MODULE})
            for stage in config.stages
        ]
    everywhere: dict[str, Any] = {
        "schedule": "1f1b",
        "max_in_flight": None,
        "balance_replicas": False,  # there are none here
    }
    return Order(
        config=config.model_copy(update={"model": model, "stages": stages, **everywhere}),
        differentiates=settings.frozen and _trains_before(config, index),
    )


def _trains_before(config: Config, index: int) -> bool:
    """Whether anything that a stage reads, directly or not, is trained."""
    graph, names = config.graph(), config.stage_names

    def trains(name: str) -> bool:
        return not config.stage(names.index(name)).frozen or any(map(trains, reads(name)))

    def reads(name: str) -> list[str]:
        return [ref.producer for ref in graph.inputs[name] if not ref.from_batch]

    return any(map(trains, reads(names[index])))
