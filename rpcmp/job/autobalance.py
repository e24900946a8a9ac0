"""Measurements before a run: `balance = "auto"`, and the shares of replicas.

For the balance, every host is measured, the cuts are chosen, and the step is predicted:

(1) a process beside the driver takes a micro-batch and counts the layers
(2) each host runs every layer with it, in a separate process        measure
(3) the cuts with the fastest slowest stage that fit into memory     rpcmp.pipelining.partition

Hosts are measured side by side, but the servers of one machine one after the other, because they
would slow each other down. Stages with equal settings on one machine are measured once. Replicas of
a stage count as one host, as fast as the last of them that completes its part of a step.

With `balance_replicas`, the replicas' parts are measured afterwards, by training: whatever makes a
replica slow (its processor, its device, its neighbours on the host) shows there and nowhere else.
For the balance, each is assumed to have a part by its speed. These steps leave nothing behind. The
shares belong to the job from then on, since they decide which gradients are summed where: they are
in every manifest, and a resumed run takes them from there.
"""

from __future__ import annotations

import asyncio
import base64
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rpcmp.checkpoint.folder import newest_in
from rpcmp.config.device_places import AUTO, on_machine, place
from rpcmp.config.job_sections import ModelCut
from rpcmp.config.schema import Config
from rpcmp.config.topology import ReplicaAssignment, shares_by_speed
from rpcmp.errors import ConfigError, RpcmpError, one_line
from rpcmp.job.cut_cache import CutCache
from rpcmp.job.segments import MOST_REHEARSED, Segments, rehearse
from rpcmp.job.server_calls import (
    code_access,
    dialer_for,
    gather_all,
    prepare_request,
    server_addresses,
    shipped_code,
)
from rpcmp.job.server_pool import connected
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import Forecast
from rpcmp.pipelining.partition import (
    HostProfile,
    ProfileOrder,
    StageHost,
    choose_balance,
    merge_profiles,
    profile_seconds,
)
from rpcmp.process.channel import Message
from rpcmp.process.fork_client import Forks
from rpcmp.process.interpreter import compute_environment
from rpcmp.process.task import run_task
from rpcmp.v1 import control_pb2 as pb

MODULE_KEYS = ("name", "module", "kwargs", "inputs")
"""The keys of `[[stages]]` that define a stage's module; the others place and tune it."""


class MeasuredHost(NamedTuple):
    """The measurement of one worker's host.

    Attributes:
        machine: equal for servers that share processors.
        device: the worker's, "auto" if neither config nor server fixes it.
        profile: of all layers, under the stage's settings.
    """

    machine: str
    device: str
    profile: HostProfile


async def measure(
    config: Config, addresses: Sequence[str], sample: bytes, forks: Forks
) -> list[MeasuredHost]:
    """Measure all layers on each worker's host; returns the results in the workers' order.

    Args:
        addresses: of running servers, one per worker; empty: start servers on this machine.
        sample: inputs and targets of one micro-batch; see `rpcmp.rpc.tensors.dumps`.
    """
    orders = [_order(config, worker.stage_index) for worker in config.workers]
    code = shipped_code(config)
    dialer = dialer_for(config, addresses)
    num_local = max(map(orders.index, orders)) + 1
    async with connected(config, dialer, addresses, num_local, forks) as clients:
        servers = await gather_all(client.connect() for client in clients)
        servers += servers[:1] * (len(orders) - len(servers))
        machines = [server.machine for server in servers]
        orders = [
            _order(config, worker.stage_index, server.device)
            for worker, server in zip(config.workers, servers, strict=True)
        ]
        equals = [orders.index(order) for order in orders]
        locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

        async def profile(index: int) -> HostProfile:
            worker = config.workers[index]
            job = prepare_request(config, worker, worker.stage_index, code)
            order = orders[index].model_dump_json()
            request = pb.ProfileRequest(job=job, order=order, sample=sample)
            async with locks[machines[index]]:
                answer = await clients[index].profile(request)
            return HostProfile.model_validate_json(answer.profile)

        keys = list(zip(machines, equals, strict=True))
        first = {key: keys.index(key) for key in keys}
        profiles = await gather_all(map(profile, first.values()))
    by_key = dict(zip(first, profiles, strict=True))
    devices = [order.config.stage(0).device for order in orders]
    return [
        MeasuredHost(key[0], device, by_key[key]) for key, device in zip(keys, devices, strict=True)
    ]


def _order(config: Config, index: int, auto: str = "") -> ProfileOrder:
    """Return the order to measure all layers with the settings of stage `index`, as one stage.

    It is equal for stages with equal settings. Stages that are modules of their own are not merged;
    all get these settings.

    Args:
        auto: what the stage's server takes for `device = "auto"`; empty: it leaves that open.
    """
    settings = config.stage(index)
    if auto and settings.device == AUTO:
        settings = settings.model_copy(update={"device": auto})
    unplaced = settings.model_copy(
        update={"addresses": [], "memory": None, "replicas": None, "shares": None}
    )
    if config.model is not None:
        model = config.model.model_copy(update={"balance": None, "num_stages": 1})
        stages = [unplaced.model_copy(update={"name": None})]
    else:
        model = None
        stages = [
            unplaced.model_copy(update={key: getattr(stage, key) for key in MODULE_KEYS})
            for stage in config.stages
        ]
    everywhere: dict[str, Any] = {
        "schedule": "1f1b",
        "max_in_flight": None,
        "balance_replicas": False,  # the order has no replicas
    }
    return ProfileOrder(
        config=config.model_copy(update={"model": model, "stages": stages, **everywhere}),
        differentiates=settings.frozen and _trains_before(config, index),
    )


def _trains_before(config: Config, index: int) -> bool:
    graph, names = config.graph(), config.stage_names

    def trains(name: str) -> bool:
        return not config.stage(names.index(name)).frozen or any(map(trains, reads(name)))

    def reads(name: str) -> list[str]:
        return [ref.producer for ref in graph.inputs[name] if not ref.from_batch]

    return any(map(trains, reads(names[index])))


WARM_STEPS = 1
"""Steps before the measurement, which touch memory and code for the first time."""

MEASURED_STEPS = 3


async def with_shares(config: Config, connect: Sequence[str] | None, forks: Forks) -> Config:
    unshared = _unshared(config)
    if not unshared:
        return config
    if config.data is None:
        raise ConfigError(
            "balance_replicas = true trains some steps to measure the replicas, and the job has no "
            "[data]; give their stages `shares`"
        )
    busy = await _busy_seconds(config, connect, forks)
    return config.with_shares({index: _shares(config, index, busy) for index in unshared})


def _unshared(config: Config) -> list[int]:
    """Return the stages whose replicas' shares are to be measured."""
    return [
        index
        for index, stage in enumerate(config.stages)
        if config.balance_replicas and stage.num_replicas > 1 and stage.shares is None
    ]


def with_saved_shares(config: Config) -> Config:
    """Return the job with the `shares` of the newest checkpoint instead of measured ones."""
    if not config.balance_replicas:
        return config
    run = newest_in(config.checkpoint_folder, config.name)
    before: Any = run.newest.config.get("stages") if run and run.newest else None
    return config.with_measured_shares(
        {index: then.get("shares") or [] for index, then in enumerate(before or ())}
    )


async def _busy_seconds(
    config: Config, connect: Sequence[str] | None, forks: Forks
) -> dict[str, float]:
    segments = Segments(config.without_schedulers(), connect, forks=forks)
    try:
        await segments.start()
        await segments.run(WARM_STEPS)
        return dict((await segments.run(MEASURED_STEPS)).busy_seconds)
    finally:
        await segments.close()


def _shares(config: Config, index: int, busy: dict[str, float]) -> list[int]:
    count = cost_model.num_bundles(config)
    turns = config.stage(index).turns
    replicas = [worker for worker in config.workers if worker.stage_index == index]
    bundles = [len(turns.numbers(worker.replica, count)) for worker in replicas]
    measured = [
        busy[worker.label] / number if number else None
        for worker, number in zip(replicas, bundles, strict=True)
    ]
    # A replica without any bundle is assumed to be as fast as the others.
    mean = statistics.mean(seconds for seconds in measured if seconds is not None)
    return shares_by_speed([mean if each is None else each for each in measured], count)


def needs_measuring(config: Config) -> bool:
    """Return whether a job cannot begin before its hosts have been measured."""
    return config.is_balanced_by_measurement or bool(_unshared(config))


async def balanced(
    config: Config, connect: Sequence[str] | None, forks: Forks, rehearses: bool = False
) -> tuple[Config, Forecast | None]:
    """Find what the config leaves open: layers of a module, the balance, the shares of replicas.

    Args:
        rehearses: whether to train some steps with the balance, which may suggest another one.

    Returns:
        The config with both, and the forecast of its steps if the balance was measured.
    """
    forecast = None
    config = await with_cut(config, connect, forks)
    if config.is_balanced_by_measurement:
        config, forecast = await with_measured_balance(config, connect, forks, rehearses)
    return await with_shares(config, connect, forks), forecast


async def with_measured_balance(
    config: Config, connect: Sequence[str] | None, forks: Forks, rehearses: bool
) -> tuple[Config, Forecast]:
    """Return the job with the balance that its hosts suggest, and the forecast; see `balanced`."""
    cost_model.limits(config)  # raises for configs that it does not support
    full = config.with_full_microbatches()
    hosts = await stage_hosts(full, connect, forks)
    forecast = Forecast(hosts, choose_balance(hosts))
    config = config.with_balance(forecast.balance)
    if rehearses:
        forecast = (await rehearsed(config, forecast, connect, forks)).improved(full)
    return config.with_balance(forecast.balance), forecast


async def rehearsed(
    config: Config, forecast: Forecast, connect: Sequence[str] | None, forks: Forks
) -> Forecast:
    """Return the forecast by measured steps, or by the layers alone, and why.

    A rehearsal that fails does not end anything: a run may do without what it has met.
    """
    full = config.with_full_microbatches()
    predicted = forecast.predict(full)
    if config.data is None or _unshared(config) or predicted.step_s > MOST_REHEARSED:
        return forecast
    if any(
        stage.limit_bytes is not None and stage.memory_bytes > stage.limit_bytes
        for stage in predicted.stages.values()
    ):
        return forecast
    try:
        measured = await rehearse(config, connect, forks)
    except RpcmpError as error:
        return replace(forecast, note=f"predicted by the layers alone: {one_line(error)}")
    return forecast.corrected(full, measured)


async def with_cut(config: Config, connect: Sequence[str] | None, forks: Forks) -> Config:
    """Return the job with the layers of its model's `module`, if it has one."""
    if not config.is_to_be_cut:
        return config
    cache = CutCache(config)
    order = {"op": "cut", **_job(config), "kept": await asyncio.to_thread(cache.read)}
    answer = await _run_here(order, config, connect, forks)
    await asyncio.to_thread(cache.write, answer["key"], answer["cut"])
    return config.with_cut(ModelCut.model_validate(answer["cut"]))


def _job(config: Config) -> Message:
    return {"config": config.model_dump_json(), "folder": str(config.folder)}


async def _run_here(
    order: Message, config: Config, connect: Sequence[str] | None, forks: Forks
) -> Message:
    """Run the job's code on the driver's host, as far from its user's files as the driver is."""
    access = code_access(config, server_addresses(config, connect))
    return await run_task(order, compute_environment(threads=1), forks, access)


async def stage_hosts(
    config: Config, connect: Sequence[str] | None, forks: Forks
) -> list[StageHost]:
    """Measure the cost of every part of the model at each stage's hosts.

    Args:
        config: from `Config.with_full_microbatches`; without a list of layers, each stage is one
            layer.
    """
    held = cost_model.held(config)
    addresses = server_addresses(config, connect)
    sample, num_layers = await sample_of(config, connect, forks)
    if config.num_stages > num_layers:
        raise ConfigError(
            f"{config.num_stages} stages need at least as many layers, but the model has "
            f"{num_layers}"
        )
    measured = await measure(config, addresses, sample, forks)
    ranks = {
        name: [rank for rank, worker in enumerate(config.workers) if worker.stage == name]
        for name in config.stage_names
    }
    return [
        StageHost(
            stage=name,
            profile=as_one(config, index, [measured[rank].profile for rank in ranks[name]]),
            limit_bytes=min(
                (
                    b
                    for rank in ranks[name]
                    if (b := memory_limit(config, rank, measured)) is not None
                ),
                default=None,
            ),
            num_microbatches=config.num_microbatches,
            held=held[name],
            recompute=config.stage(index).recompute,
        )
        for index, name in enumerate(config.stage_names)
    ]


def as_one(config: Config, index: int, replicas: Sequence[HostProfile]) -> HostProfile:
    stage, bundles = config.stage(index), cost_model.num_bundles(config)
    turns = stage.turns
    if config.balance_replicas and stage.shares is None:
        turns = ReplicaAssignment(
            shares_by_speed([max(profile_seconds(each), 1e-9) for each in replicas], bundles)
        )
    parts = [len(turns.numbers(replica, bundles)) / bundles for replica in range(len(replicas))]
    return merge_profiles(replicas, parts)


async def sample_of(
    config: Config, connect: Sequence[str] | None, forks: Forks
) -> tuple[bytes, int]:
    """Return one micro-batch, see `rpcmp.rpc.tensors.dumps`, and the model's number of layers."""
    answer = await _run_here({"op": "sample", **_job(config)}, config, connect, forks)
    return base64.b64decode(answer["sample"]), answer["num_layers"]


def memory_limit(config: Config, rank: int, measured: Sequence[MeasuredHost]) -> int | None:
    """Return a worker's limit in bytes: its stage's, or else its share of the device's memory."""
    stages = [config.stage(worker.stage_index) for worker in config.workers]
    if (own := stages[rank].memory_bytes) is not None:
        return own
    host = measured[rank]
    if host.profile.available_bytes is None:
        return None
    machines = [other.machine for other in measured]
    here, own = on_machine([other.device for other in measured], machines, rank)
    places = [
        place(here, index, host.profile.num_devices) if name == AUTO else name
        for index, name in enumerate(here)
    ]
    return host.profile.available_bytes // places.count(places[own])
