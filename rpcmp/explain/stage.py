"""What one stage of a run will be. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rpcmp import inflight
from rpcmp.balance.cuts import StageHost
from rpcmp.config import Config
from rpcmp.explain.memory import Memory, memory
from rpcmp.inventory.facts import Inventory, LayerFacts


@dataclass(frozen=True)
class Stage:
    """One stage, as its run will have it.

    Attributes:
        index: its place in the config.
        name: its name.
        inputs: what it reads.
        replicas: how many copies share its micro-batches.
        shares: how; empty for one, and where they are equal or will be measured.
        device, threads: where and with how many threads each computes.
        frozen, recompute: see the config's keys.
        autocast: what it computes in; None: the layers' own.
        addresses: HOST:PORT of its servers; none: they are started on this machine.
        layers: in order.
        parameters: of all layers.
        trained: of these, how many its optimizer steps.
        tied: names of those that are another one's, whose stage steps them.
        in_flight: micro-batches of which a replica may hold activations.
        memory: of each replica.
    """

    index: int
    name: str
    inputs: list[str]
    replicas: int
    shares: list[int]
    device: str
    threads: int
    frozen: bool
    recompute: bool
    autocast: str | None
    addresses: list[str]
    layers: list[LayerFacts]
    parameters: int
    trained: int
    tied: list[str]
    in_flight: int
    memory: Memory


def stages(
    config: Config,
    inventory: Inventory,
    hosts: Sequence[StageHost] | None,
    addresses: Sequence[str] = (),
) -> list[Stage]:
    """All stages, in the config's order.

    Args:
        config: the job, with its balance.
        inventory: what it is made of.
        hosts: what was measured; None: nothing.
        addresses: of running servers, one a worker; none: they are started on this machine.
    """
    held, graph = inflight.held(config), config.graph()
    ends = [0, *accumulate(len(facts.layers) for facts in inventory.stages)]
    pairs = list(zip(config.workers, addresses, strict=False))
    found = []
    for index, (name, facts) in enumerate(zip(config.stage_names, inventory.stages, strict=True)):
        settings = config.stage(index)
        limit = settings.memory_bytes
        if limit is None and not addresses:
            limit = _share(config, index, inventory)
        part, host = (ends[index], ends[index + 1]), None if hosts is None else hosts[index]
        found.append(
            Stage(
                index=index,
                name=name,
                inputs=[str(reference) for reference in graph.inputs[name]],
                replicas=settings.num_replicas,
                shares=settings.shares or [],
                device=settings.device,
                threads=settings.threads,
                frozen=settings.frozen,
                recompute=settings.recompute,
                autocast=config.autocast_of(index),
                addresses=[at for worker, at in pairs if worker.stage_index == index],
                layers=facts.layers,
                parameters=facts.parameters,
                trained=facts.trained,
                tied=facts.foreign,
                in_flight=held[name],
                memory=memory(config, facts, host, part, limit),
            )
        )
    return found


def _share(config: Config, index: int, inventory: Inventory) -> int | None:
    """What each worker on this machine's processors may have of its memory."""
    devices = [config.stage(worker.stage_index).device for worker in config.workers]
    if config.stage(index).device != "cpu" or inventory.available_bytes is None:
        return None
    return inventory.available_bytes // devices.count("cpu")
