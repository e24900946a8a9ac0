"""Layers, settings and memory of each stage, as its run will have them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rpcmp.checkpoint.slots import RETAINED
from rpcmp.config.schema import Config
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.partition import StageHost
from rpcmp.tools.explain.model_summary import LayerFacts, ModelSummary, StageFacts

SNAPSHOTS = RETAINED + 1
"""Copies of a stage that its supervisor holds: the whole ones, and one being written."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker; None if unknown.

    Attributes:
        process: of a worker without layers: torch, Python.
        parameters, buffers, gradients: of its layers.
        optimizer: its state; None if only a real step creates it and nothing was measured.
        activations: of all micro-batches that it may hold at once, their inputs included.
        snapshots: copies of parameters, buffers and optimizer state that its supervisor holds in
            case it is lost; in the host's memory, whatever the stage's device.
        limit: how much it may use.
    """

    process: int | None
    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    activations: int | None
    snapshots: int | None
    limit: int | None

    @property
    def total(self) -> int:
        """Sum of what is known, without the supervisor's snapshots."""
        measured = (self.process or 0) + (self.activations or 0)
        return measured + self.parameters + self.buffers + self.gradients + (self.optimizer or 0)

    @property
    def is_whole(self) -> bool:
        return None not in (self.process, self.optimizer, self.activations)

    @property
    def is_too_much(self) -> bool:
        return self.limit is not None and self.total > self.limit


def estimate_memory(
    config: Config,
    facts: StageFacts,
    host: StageHost | None,
    part: tuple[int, int],
    limit: int | None,
) -> MemoryEstimate:
    """Estimate the memory of a stage's worker.

    Args:
        host: measurements of its host; None if there are none.
        part: (start, stop) of the stage's layers among all that were measured.
        limit: how much it may use, if there are no measurements.
    """
    optimizer = facts.optimizer_bytes
    process = activations = None
    if host is not None:
        process, limit = host.profile.base_bytes, host.limit_bytes
        layers = host.profile.layers[slice(*part)]
        kept = sum(layer.activation_bytes for layer in layers)
        times = 1 if host.recompute else host.held
        activations = host.held * layers[0].input_bytes + times * kept
        if optimizer is None:
            known = facts.parameter_bytes + facts.buffer_bytes + facts.gradient_bytes
            optimizer = max(0, sum(layer.state_bytes for layer in layers) - known)
    snapshots = None
    if config.takes_snapshots and optimizer is not None:
        own = facts.parameter_bytes - facts.foreign_bytes + facts.buffer_bytes
        snapshots = SNAPSHOTS * (own + optimizer)
    return MemoryEstimate(
        process=process,
        parameters=facts.parameter_bytes,
        buffers=facts.buffer_bytes,
        gradients=facts.gradient_bytes,
        optimizer=optimizer,
        activations=activations,
        snapshots=snapshots,
        limit=limit,
    )


@dataclass(frozen=True)
class ExplainedStage:
    """One stage as it will run.

    Attributes:
        replicas: number of workers that share its micro-batches.
        shares: of the replicas; empty if they are equal, or measured when the run starts.
        device, threads: of each replica.
        frozen, recompute: see the config's keys.
        autocast: dtype that it computes in; None: the layers' own.
        addresses: HOST:PORT of its servers; empty if they are started on this machine.
        parameters: number of parameters of all layers.
        trained: how many of them its optimizer steps.
        tied: names of parameters that belong to another stage, which steps them.
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
    memory: MemoryEstimate


def explain_stages(
    config: Config,
    summary: ModelSummary,
    hosts: Sequence[StageHost] | None,
    addresses: Sequence[str] = (),
) -> list[ExplainedStage]:
    """Return all stages, in the config's order.

    Args:
        hosts: measurements of the stages' hosts; None if there are none.
        addresses: of running servers, one per worker; empty if they are started on this machine.
    """
    held, graph = cost_model.held(config), config.graph()
    ends = [0, *accumulate(len(facts.layers) for facts in summary.stages)]
    pairs = list(zip(config.workers, addresses, strict=False))
    explained = []
    for index, (name, facts) in enumerate(zip(config.stage_names, summary.stages, strict=True)):
        settings = config.stage(index)
        limit = settings.memory_bytes
        if limit is None and not addresses:
            limit = _memory_share(config, index, summary)
        part, host = (ends[index], ends[index + 1]), None if hosts is None else hosts[index]
        explained.append(
            ExplainedStage(
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
                memory=estimate_memory(config, facts, host, part, limit),
            )
        )
    return explained


def _memory_share(config: Config, index: int, summary: ModelSummary) -> int | None:
    """Return this machine's memory divided by its workers on the CPU."""
    devices = [config.stage(worker.stage_index).device for worker in config.workers]
    if config.stage(index).device != "cpu" or summary.available_bytes is None:
        return None
    return summary.available_bytes // devices.count("cpu")
