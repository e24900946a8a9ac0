"""What `balance = "auto"` comes to: every host asked, the cuts chosen, the step predicted.

(1) a process beside the driver takes a micro-batch and counts the layers
(2) each host runs every layer with it, in a process of its own      job.hostprofiles
(3) the cuts with the fastest slowest stage that fit into memory     rpcmp.balance
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import NamedTuple

from rpcmp import inflight
from rpcmp.balance.cuts import StageHost, choose
from rpcmp.balance.prediction import Prediction, predict
from rpcmp.config import Config
from rpcmp.errors import ConfigError
from rpcmp.job.calls import require_one_each
from rpcmp.job.hostprofiles import Measured, measure
from rpcmp.process.child import Child
from rpcmp.process.environment import compute_environment
from rpcmp.process.forking import Forks


class Balanced(NamedTuple):
    """A job whose balance is known.

    Attributes:
        config: with a list where it said "auto".
        prediction: what the list promises; None where nothing was measured.
    """

    config: Config
    prediction: Prediction | None


async def balanced(config: Config, connect: Sequence[str] | None, forks: Forks) -> Balanced:
    """Measure the model and choose its balance, where the config leaves that to us.

    Args:
        config: the job.
        connect: addresses of running stage servers; see Session.
        forks: where processes come from.

    Raises:
        ConfigError: more stages than layers, no balance fits into memory, or there is no data.
        RpcmpError: a layer or a host fails.
    """
    if not config.is_balanced_by_measurement:
        return Balanced(config, None)
    held = inflight.held(config)
    addresses = config.addresses if connect is None else connect
    require_one_each(config, addresses)
    measured = await measure(config, addresses, await _sample(config, forks), forks)
    hosts = [
        StageHost(
            stage=name,
            profile=found.profile,
            limit_bytes=_limit(config, index, measured),
            num_microbatches=config.num_microbatches,
            held=held[name],
            recompute=config.stage(index).recompute,
        )
        for index, (name, found) in enumerate(zip(config.stage_names, measured, strict=True))
    ]
    balance = choose(hosts)
    return Balanced(config.with_balance(balance), predict(config, hosts, balance))


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


def _limit(config: Config, index: int, measured: Sequence[Measured]) -> int | None:
    """Bytes that a stage may take up: its own limit, else its share of what its device has."""
    if (own := config.stage(index).memory_bytes) is not None:
        return own
    found = measured[index]
    if found.profile.available_bytes is None:
        return None
    place = (found.machine, config.stage(index).device)
    places = [(other.machine, config.stage(i).device) for i, other in enumerate(measured)]
    return found.profile.available_bytes // places.count(place)
