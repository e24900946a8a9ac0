"""How much is under way: at each stage, by its schedule, and in the whole job.

Schedules count bundles, which is one micro-batch or as many as travel in one message; see
rpcmp.rpc.messages. Pure: no torch, so that supervisors can predict what workers will keep.
"""

from __future__ import annotations

from rpcmp.config import topology
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import simulation
from rpcmp.pipelining.schedule import InFlightLimits, policy

AHEAD = 2
"""Bundles that are asked for beyond what the stages may hold: their questions then lie at the first
stage before it has room for them, and it waits for nobody."""

STEPS_AHEAD = 2
"""Train steps under way at once: the next one's questions arrive while the stages finish this."""


def num_bundles(config: Config) -> int:
    """Bundles of a step."""
    return topology.num_bundles(config.num_microbatches, config.microbatches_per_message)


def limits(config: Config) -> dict[str, InFlightLimits]:
    """Bundles that each stage may keep, by its name; see `simulation.limits`.

    Raises:
        ConfigError: the schedule cannot run with the config's `max_in_flight`.
    """
    chosen = policy(config.schedule)
    graph, most, count = config.graph(), config.max_in_flight, config.num_microbatches
    per_message = config.microbatches_per_message
    simulation.limits(graph, chosen, count, most)  # for its errors, which speak of micro-batches
    if most is not None:
        if most < min(per_message, count):
            raise ConfigError(
                f"max_in_flight = {most}, but one message has microbatches_per_message = "
                f"{per_message}; give at least as many, better that times the number of stages"
            )
        all_bundles = num_bundles(config) if most >= count else 0
        most = max(most // per_message, all_bundles)
    turns = {worker.stage: config.stage(worker.stage_index).turns for worker in config.workers}
    return simulation.limits(graph, chosen, num_bundles(config), most, turns)


def held(config: Config) -> dict[str, int]:
    """Micro-batches between forward and weight gradient that each stage may keep, by its name."""
    return {
        name: min(each.held * config.microbatches_per_message, config.num_microbatches)
        for name, each in limits(config).items()
    }


def in_flight(config: Config) -> int:
    """Bundles that are under way at once."""
    return conducted(config) * config.stage(_sink_index(config)).num_replicas


def conducted(config: Config) -> int:
    """Bundles that one conductor has under way at once: each replica of the sink has one."""
    sink = config.stage(_sink_index(config)).turns
    kept = limits(config)
    most = max(kept[worker.stage].open * worker.num_replicas for worker in config.workers)
    share = -(-most // sink.num_replicas)
    return min(share + AHEAD, STEPS_AHEAD * sink.most(num_bundles(config)))


def _sink_index(config: Config) -> int:
    return config.stage_names.index(config.graph().sink)
