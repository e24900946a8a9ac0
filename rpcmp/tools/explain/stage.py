"""What one stage of a run will be. Pure.

The memory that a worker will take up, and its supervisor for it. Pure.

Which files a run reads and writes, and where. Pure but for a look at what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rpcmp.checkpoint.runs import require_none_asked_for
from rpcmp.checkpoint.slots import RETAINED
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.job import code
from rpcmp.pipelining import inflight
from rpcmp.pipelining.partition import StageHost
from rpcmp.tools.explain.model_summary import LayerFacts, ModelSummary, StageFacts

SNAPSHOTS = RETAINED + 1
"""Copies of a stage that its supervisor holds: those that are whole, and one being written."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one worker; None where they were not measured.

    Attributes:
        process: of a worker whatever its layers are: torch, Python.
        parameters, buffers, gradients: of its layers.
        optimizer: its state; None where the optimizer tells only by a real step.
        activations: of all micro-batches that it may hold at once, with what it has received.
        snapshots: copies of parameters, buffers and optimizer state that its supervisor holds for
            the case that it is lost; in the host's memory, whatever the stage's device.
        limit: what it may take up; None: nobody knows.
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
        """All that is known of the worker's, without its supervisor's snapshots."""
        measured = (self.process or 0) + (self.activations or 0)
        return measured + self.parameters + self.buffers + self.gradients + (self.optimizer or 0)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing in `total`."""
        return None not in (self.process, self.optimizer, self.activations)

    @property
    def is_too_much(self) -> bool:
        """Whether the worker will not fit."""
        return self.limit is not None and self.total > self.limit


def memory(
    config: Config,
    facts: StageFacts,
    host: StageHost | None,
    part: tuple[int, int],
    limit: int | None,
) -> MemoryEstimate:
    """That of one stage's worker.

    Args:
        config: the job.
        facts: what the stage is made of.
        host: what was measured there; None: nothing.
        part: the stage's first layer among all that were measured, and the one after its last.
        limit: what it may take up where nothing was measured.
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
    memory: MemoryEstimate


def stages(
    config: Config,
    inventory: ModelSummary,
    hosts: Sequence[StageHost] | None,
    addresses: Sequence[str] = (),
) -> list[ExplainedStage]:
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
                memory=memory(config, facts, host, part, limit),
            )
        )
    return found


def _share(config: Config, index: int, inventory: ModelSummary) -> int | None:
    """What each worker on this machine's processors may have of its memory."""
    devices = [config.stage(worker.stage_index).device for worker in config.workers]
    if config.stage(index).device != "cpu" or inventory.available_bytes is None:
        return None
    return inventory.available_bytes // devices.count("cpu")


@dataclass(frozen=True)
class File:
    """A file or a folder.

    Attributes:
        what: which.
        path: absolute, on whichever host.
        text: who does what with it, and when.
        is_in_the_way: whether a run would refuse to begin because of it.
    """

    what: str
    path: str
    text: str
    is_in_the_way: bool = False


def files(config: Config) -> list[File]:
    """All of a job's.

    Raises:
        ConfigError: there is more beside the config than belongs to a model.
    """
    found = [_code(config)] if config.ship_code else []
    if config.init is not None:
        found.append(File("weights", config.init, "read by each stage, on its host"))
    if (folder := config.log_folder) is not None:
        text = "a folder for this run: config, versions, metrics, events, log, last steps' trace"
        found.append(File("run folder", str(folder), text))
    if (folder := config.tensorboard_folder) is not None:
        found.append(
            File("TensorBoard", str(folder), "scalars of this run, in a folder of its own")
        )
    return [*found, _checkpoints(config)]


def _code(config: Config) -> File:
    sent = code.collect(config.folder)
    size = sum(len(file.content) for file in sent)
    count = f"{len(sent)} Python file{'s' * (len(sent) != 1)}"
    return File("code", str(config.folder), f"{count} ({size:,} bytes), sent to each stage server")


def _checkpoints(config: Config) -> File:
    folder, section = config.checkpoint_folder, config.checkpoint
    if section is None:
        keeps = config.takes_snapshots
        text = "only if the run has to give up" if keeps else "none: recovery is off"
        return _looked_at(config, File("checkpoints", str(folder), text))
    when = [
        *([f"every {section.every_steps} steps"] if section.every_steps else []),
        *([f"every {section.every_seconds:g} s"] if section.every_seconds else []),
    ] or ["every 300 s"]
    where = (
        "one folder for all hosts"
        if section.shared
        else ("each stage's file on its host, and a copy on its neighbour's; the manifest here")
    )
    best = f", and the best by {section.best}" if section.best else ""
    text = f"{' or '.join(when)} and at the end, {section.keep} kept{best}; {where}"
    return _looked_at(config, File("checkpoints", str(folder), text))


def _looked_at(config: Config, file: File) -> File:
    """With what a run would say to what is there already."""
    if config.checkpoint is not None:
        try:
            require_none_asked_for(config.checkpoint_folder)
        except ConfigError as error:
            return File(file.what, file.path, str(error), is_in_the_way=True)
    return file
