"""What is measured before a run: `balance = "auto"`, and the shares of replicas.

For the balance every host is asked, the cuts are chosen, and the step is predicted:

(1) a process beside the driver takes a micro-batch and counts the layers
(2) each host runs every layer with it, in a process of its own      job.hostprofiles
(3) the cuts with the fastest slowest stage that fit into memory     rpcmp.balance

Replicas of a stage count as one host, which is as fast as the last of them to end its part of a
step. Where `balance_replicas` leaves the parts to a measurement, that comes afterwards
(`job.sharing`); until then each is taken to have one by its speed.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple

from rpcmp import inflight
from rpcmp.balance.cuts import StageHost, choose
from rpcmp.balance.prediction import Prediction, predict
from rpcmp.balance.profile import HostProfile, seconds, together
from rpcmp.config import Config
from rpcmp.errors import ConfigError
from rpcmp.job.calls import require_one_each
from rpcmp.job.hostprofiles import Measured, measure
from rpcmp.job.sharing import with_shares
from rpcmp.process.child import Child
from rpcmp.process.environment import compute_environment
from rpcmp.process.forking import Forks
from rpcmp.turns import Turns, by_speed


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
        connect: addresses of running stage servers; see Fleet.
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
    balance = choose(hosts)
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
        connect: addresses of running stage servers; see Fleet.
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
        turns = Turns(by_speed([max(seconds(each), 1e-9) for each in replicas], bundles))
    parts = [len(turns.numbers(replica, bundles)) / bundles for replica in range(len(replicas))]
    return together(replicas, parts)


async def _sample(config: Config, forks: Forks) -> bytes:
    """One micro-batch; see `rpcmp.handoff.dumps`."""
    child = await Child.spawn("rpcmp.profile", compute_environment(threads=1), forks=forks)
    answer = await child.ask(
        {"op": "sample", "config": config.model_dump_json(), "folder": str(config.folder)}
    )
    if config.num_stages > answer["num_layers"]:
        raise ConfigError(
            f"{config.num_stages} stages need at least as many layers, but the model has "
            f"{answer['num_layers']}"
        )
    return base64.b64decode(answer["sample"])


def _limit(config: Config, rank: int, measured: Sequence[Measured]) -> int | None:
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
