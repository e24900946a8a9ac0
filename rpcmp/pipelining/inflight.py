"""The micro-batches in flight: per stage, by its schedule, and in the whole job.

Schedules count bundles: all micro-batches that travel in one message; see rpcmp.rpc.messages.
Pure: no torch, so that supervisors can predict the memory of workers.
"""

from __future__ import annotations

from rpcmp.config import topology
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import simulation
from rpcmp.pipelining.schedule import InFlightLimits, policy

AHEAD = 2
"""Bundles that are requested beyond the stages' limits: their requests then lie at the first stage
before it has room for them, so that it never waits for one."""

STEPS_AHEAD = 2
"""Train steps in flight: the next one's requests arrive while the stages finish this one."""


def num_bundles(config: Config) -> int:
    return topology.num_bundles(config.num_microbatches, config.microbatches_per_message)


def limits(config: Config) -> dict[str, InFlightLimits]:
    """Return the bundles that each stage may keep, by its name; see `simulation.limits`."""
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
    """Return the most micro-batches between forward and weight gradient, by the stage's name."""
    return {
        name: min(each.held * config.microbatches_per_message, config.num_microbatches)
        for name, each in limits(config).items()
    }


def in_flight(config: Config) -> int:
    """Return the most bundles in flight in the whole job."""
    return conducted(config) * config.stage(_sink_index(config)).num_replicas


def conducted(config: Config) -> int:
    """Return the most bundles in flight per replica of the sink, each of which runs its part."""
    sink = config.stage(_sink_index(config)).turns
    kept = limits(config)
    most = max(kept[worker.stage].open * worker.num_replicas for worker in config.workers)
    share = -(-most // sink.num_replicas)
    return min(share + AHEAD, STEPS_AHEAD * sink.most(num_bundles(config)))


def _sink_index(config: Config) -> int:
    return config.stage_names.index(config.graph().sink)
