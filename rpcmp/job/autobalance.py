"""What is measured before a run: `balance = "auto"`, and the shares of replicas.

For the balance every host is asked, the cuts are chosen, and the step is predicted:

(1) a process beside the driver takes a micro-batch and counts the layers
(2) each host runs every layer with it, in a process of its own      job.hostprofiles
(3) the cuts with the fastest slowest stage that fit into memory     rpcmp.balance

Replicas of a stage count as one host, which is as fast as the last of them to end its part of a
step. Where `balance_replicas` leaves the parts to a measurement, that comes afterwards
(`job.sharing`); until then each is taken to have one by its speed.

Asking every worker's host how long it takes for each layer.

Hosts are asked side by side, but the servers of one machine one after the other, for they would
slow each other. Stages with equal settings on one machine are measured once.

Which replica takes how many micro-batches, where the config leaves that to us.

Measured once, by training: whatever makes a replica slow, its processor, its device, its neighbours
on the same host, shows there and nowhere else. Nothing of these steps is kept. What was found
belongs to the job from then on, since it decides which gradients are summed where: it is in every
manifest, and a run that is resumed takes it from there.
"""

from __future__ import annotations

import asyncio
import base64
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rpcmp.checkpoint.runs import newest_in
from rpcmp.config.schema import Config
from rpcmp.config.topology import ReplicaAssignment, shares_by_speed
from rpcmp.errors import ConfigError
from rpcmp.job import code
from rpcmp.job.segments import Segments
from rpcmp.job.server_calls import all_of, dialer_of, require_one_each
from rpcmp.job.status import visiting
from rpcmp.pipelining import inflight
from rpcmp.pipelining.cost_model import Prediction, predict
from rpcmp.pipelining.layer_profile import (
    HostProfile,
    ProfileOrder,
    merge_profiles,
    profile_seconds,
)
from rpcmp.pipelining.partition import StageHost, choose_balance
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.task import run_task
from rpcmp.server.client import StageClient
from rpcmp.server.connection import versions
from rpcmp.v1 import control_pb2 as pb

MODULE = ("name", "module", "kwargs", "inputs")
"""The keys of `[[stages]]` that say what a stage is; the others place it and tune it."""


@dataclass(frozen=True)
class MeasuredHosts:
    """What one worker's host says.

    Attributes:
        machine: equal for servers that share processors.
        profile: all layers, under the stage's settings.
    """

    machine: str
    profile: HostProfile


async def measure(
    config: Config, addresses: Sequence[str], sample: bytes, forks: Forks
) -> list[MeasuredHosts]:
    """What each worker's host says, in the order of the workers.

    Args:
        config: the job.
        addresses: of running servers, one a worker; none starts servers on this machine.
        sample: inputs and targets of one micro-batch; see `rpcmp.rpc.tensors.dumps`.
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
    return [MeasuredHosts(key[0], by_key[key]) for key in keys]


async def _machines(clients: list[StageClient], count: int) -> list[str]:
    """Each worker's machine. There are fewer servers than workers only where all are here."""
    found = [description.machine for description in await all_of(c.connect() for c in clients)]
    return found + found[:1] * (count - len(found))


async def _ask(client: StageClient, turn: asyncio.Lock, request: pb.ProfileRequest) -> HostProfile:
    async with turn:
        answer = await client.profile(request)
    return HostProfile.model_validate_json(answer.profile)


def _request(
    config: Config, rank: int, orders: list[ProfileOrder], files: list[pb.CodeFile], sample: bytes
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


def _order(config: Config, index: int) -> ProfileOrder:
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
    return ProfileOrder(
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


WARM_STEPS = 1
"""Before the measurement: memory and code that are touched for the first time."""

MEASURED_STEPS = 3


async def with_shares(config: Config, connect: Sequence[str] | None, forks: Forks) -> Config:
    """The job with `shares` for all stages that have replicas.

    Args:
        config: the job, with its balance.
        connect: addresses of running stage servers; see ServerPool.
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
    return shares_by_speed([next(found) if number else unknown for number in bundles], count)


class Balanced(NamedTuple):
    """A job whose balance is known.

    Attributes:
        config: with a list where it said "auto", and shares where it said `balance_replicas`.
        prediction: what the list promises; None where nothing was measured.
    """

    config: Config
    prediction: Prediction | None


async def balanced(config: Config, connect: Sequence[str] | None, forks: Forks) -> Balanced:
    """Measure what the config leaves to us: the model's balance, the shares of replicas.

    Args:
        config: the job.
        connect: addresses of running stage servers; see ServerPool.
        forks: where processes come from.

    Raises:
        ConfigError: more stages than layers, no balance fits into memory, or there is no data.
        RpcmpError: a layer or a host fails.
    """
    prediction: Prediction | None = None
    if config.is_balanced_by_measurement:
        config, prediction = await _with_balance(config, connect, forks)
    return Balanced(await with_shares(config, connect, forks), prediction)


async def _with_balance(config: Config, connect: Sequence[str] | None, forks: Forks) -> Balanced:
    inflight.limits(config)  # for what it refuses
    full = with_full_microbatches(config)
    hosts = await stage_hosts(full, connect, forks)
    balance = choose_balance(hosts)
    return Balanced(config.with_balance(balance), predict(full, hosts, balance))


def with_full_microbatches(config: Config) -> Config:
    """The job with as many micro-batches as a mini-batch has samples for: what its steps are."""
    count = config.num_full_microbatches
    if count == config.num_microbatches:
        return config
    return config.model_copy(update={"num_microbatches": count})


async def stage_hosts(
    config: Config, connect: Sequence[str] | None, forks: Forks
) -> list[StageHost]:
    """What any part of the model would cost at each stage, measured at its hosts.

    Args:
        config: the job, see `with_full_microbatches`; where it has no list of layers, each stage is
            one layer.
        connect: addresses of running stage servers; see ServerPool.
        forks: where processes come from.

    Raises:
        ConfigError: more stages than layers, or there is no data.
        RpcmpError: a layer or a host fails.
    """
    held = inflight.held(config)
    addresses = config.addresses if connect is None else connect
    require_one_each(config, addresses)
    measured = await measure(config, addresses, await _sample(config, forks), forks)
    ranks = {
        name: [rank for rank, worker in enumerate(config.workers) if worker.stage == name]
        for name in config.stage_names
    }
    return [
        StageHost(
            stage=name,
            profile=as_one(config, index, [measured[rank].profile for rank in ranks[name]]),
            limit_bytes=min(
                (b for rank in ranks[name] if (b := _limit(config, rank, measured)) is not None),
                default=None,
            ),
            num_microbatches=config.num_microbatches,
            held=held[name],
            recompute=config.stage(index).recompute,
        )
        for index, name in enumerate(config.stage_names)
    ]


def as_one(config: Config, index: int, replicas: Sequence[HostProfile]) -> HostProfile:
    """The hosts of a stage's replicas as one.

    Args:
        config: the job.
        index: which stage.
        replicas: what was measured on each.
    """
    stage, bundles = config.stage(index), inflight.num_bundles(config)
    turns = stage.turns
    if config.balance_replicas and stage.shares is None:
        turns = ReplicaAssignment(
            shares_by_speed([max(profile_seconds(each), 1e-9) for each in replicas], bundles)
        )
    parts = [len(turns.numbers(replica, bundles)) / bundles for replica in range(len(replicas))]
    return merge_profiles(replicas, parts)


async def _sample(config: Config, forks: Forks) -> bytes:
    """One micro-batch; see `rpcmp.rpc.tensors.dumps`."""
    answer = await run_task(
        {"op": "sample", "config": config.model_dump_json(), "folder": str(config.folder)},
        compute_environment(threads=1),
        forks,
    )
    if config.num_stages > answer["num_layers"]:
        raise ConfigError(
            f"{config.num_stages} stages need at least as many layers, but the model has "
            f"{answer['num_layers']}"
        )
    return base64.b64decode(answer["sample"])


def _limit(config: Config, rank: int, measured: Sequence[MeasuredHosts]) -> int | None:
    """Bytes that a worker may take up: its stage's limit, else its share of what its device has."""
    stages = [config.stage(worker.stage_index) for worker in config.workers]
    if (own := stages[rank].memory_bytes) is not None:
        return own
    found = measured[rank]
    if found.profile.available_bytes is None:
        return None
    place = (found.machine, stages[rank].device)
    places = [(other.machine, stages[i].device) for i, other in enumerate(measured)]
    return found.profile.available_bytes // places.count(place)
