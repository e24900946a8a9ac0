"""Assign a stage and its layers to every worker.

The driver makes the assignments before it starts any worker, so that a balance that does not add
up or a factory that does not import ends the job before anything is built.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from pydantic import Field
from torch import nn

from rpcmp.config import importing
from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.config.types import Factory, OptimizerFactory, Strict
from rpcmp.errors import ConfigError, one_line
from rpcmp.pipelining import (
    cost_model,
    devices,
    initial_weights,
    layers,
    optimizer_parts,
    optimizers,
    parameter_names,
    partition,
)
from rpcmp.pipelining.schedule import InFlightLimits
from rpcmp.pipelining.weight_files import WeightFiles
from rpcmp.splitting.building import init_at


class TiedParameter(Strict):
    """One name of a tied parameter, and the stage that has it."""

    stage: str
    name: str


class Assignment(Strict):
    """One worker's part of a job; sent as JSON in StartRequest.assignment.

    Attributes:
        limits: bundles that this stage may keep, by the options that the job starts with.
        in_flight: the most bundles in flight in the whole job, by any options it may change to.
        in_flight_per_replica: the same per replica of the sink.
        may_split: whether this stage may have to split its backwards.
        driver_metrics: names of the metrics that the driver computes.
        loads_data: whether the stages load their part of the batch themselves.
        device: the worker's, once its host has settled it; None: as the config says.
        weights: the names of its tensors in `init`, for the driver alone; None if only the worker
            can know them, or if the driver has no copy of `init`.
    """

    config: Config
    stage_index: int = Field(ge=0)
    replica: int = Field(default=0, ge=0)
    layers: list[str] = Field(min_length=1)
    limits: InFlightLimits = InFlightLimits(1, 1)
    in_flight: int = Field(default=1, ge=1)
    in_flight_per_replica: int = Field(default=1, ge=1)
    may_split: bool = False
    driver_metrics: list[str] = Field(default_factory=list)
    loads_data: bool = False
    device: str | None = None
    tied: list[list[TiedParameter]] = Field(default_factory=list)
    weights: list[str] | None = Field(default=None, exclude=True)

    @property
    def stage_name(self) -> str:
        return self.config.stage_names[self.stage_index]

    @property
    def member(self) -> Member:
        return Member(self.stage_name, self.stage_index, self.replica, self.stage.num_replicas)

    @property
    def stage(self) -> StageConfig:
        return self.config.stage(self.stage_index)


def assign(
    config: Config,
    settings: Sequence[ScheduleOptions] = (),
    driver_metrics: Sequence[str] = (),
    loads_data: bool = False,
) -> list[Assignment]:
    """Return every worker's assignment, in the config's order.

    Args:
        settings: further options that the job may change to between steps.
        driver_metrics, loads_data: see `Assignment`.
    """
    _try_out(config, driver_metrics)
    configs = [config, *(setting.on(config) for setting in settings)]
    limits = [cost_model.limits(each) for each in configs]
    in_flight = max(map(cost_model.in_flight, configs))
    per_replica = max(map(cost_model.in_flight_per_replica, configs))
    layers_of_stages = _layers_of_stages(config)
    stage_of = {
        layer: stage
        for stage, names in zip(config.stage_names, layers_of_stages, strict=True)
        for layer in names
    }
    known = None
    in_parts = _updates_in_parts(config)
    if config.refers_to_parameters or config.init is not None or in_parts is not None:
        known = parameter_names.named_parameters_of(config, layers_of_stages)
    weights = _weights_of_layers(config, stage_of, known)
    names_of = dict.fromkeys(stage_of) if known is None else known

    def stage_with(parameter: str) -> str:
        return stage_of[parameter_names.layer_of(config, parameter, names_of)]

    tied = [
        [TiedParameter(stage=stage_with(name), name=name) for name in group]
        for group in config.tied
    ]
    if known is not None:
        _check_names(config, known, stage_of)
        if in_parts is not None:
            source, schedule = in_parts
            shapes = _trained_shapes(config, known, stage_of)
            optimizer_parts.require_separable(source, shapes, schedule)
    return [
        Assignment(
            config=config,
            stage_index=worker.stage_index,
            replica=worker.replica,
            layers=layers_of_stages[worker.stage_index],
            limits=limits[0][worker.stage],
            in_flight=in_flight,
            in_flight_per_replica=per_replica,
            may_split=any(each[worker.stage].splits for each in limits),
            driver_metrics=list(driver_metrics),
            loads_data=loads_data,
            tied=tied,
            weights=None
            if weights is None
            else [
                name for layer in layers_of_stages[worker.stage_index] for name in weights[layer]
            ],
        )
        for worker in config.workers
    ]


def _updates_in_parts(config: Config) -> tuple[OptimizerFactory, Factory | None] | None:
    """Return what several stages have each for itself, if any of it is the user's own."""
    first, *others = (
        (config.optimizer_of(index), config.scheduler_of(index))
        for index in range(config.num_stages)
    )
    is_one = bool(others) and all(each == first for each in others)
    return first if is_one and optimizer_parts.has_own(*first) else None


def _trained_shapes(
    config: Config, known: Mapping[str, parameter_names.Named], stage_of: Mapping[str, str]
) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the parameters that each stage's optimizer has, by name."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {stage: {} for stage in config.stage_names}
    for layer, named in known.items():
        own = named.trained - set(config.tied_to)
        shapes[stage_of[layer]] |= {n: each for n, each in named.shapes.items() if n in own}
    return [*shapes.values()]


def _check_names(
    config: Config, known: Mapping[str, parameter_names.Named], stage_of: Mapping[str, str]
) -> None:
    """Check that the parameters that the config names exist and fit.

    Modules that cannot be built here are checked after the stages have built them.
    """
    kinds = {name: kind for named in known.values() for name, kind in named.parameters.items()}
    parameter_names.require_equal_ties(config.tied, kinds)
    of_stages: dict[str, dict[str, bool]] = {stage: {} for stage in config.stage_names}
    for layer, named in known.items():
        of_stages[stage_of[layer]] |= {name: name in named.trained for name in named.parameters}
    optimizers.require_matches(config, of_stages)


def _weights_of_layers(
    config: Config, unsplit: Iterable[str], known: Mapping[str, parameter_names.Named] | None
) -> dict[str, list[str]] | None:
    """Return the names in `init` of each layer's tensors; None if they are not known here.

    Raises ConfigError if `init` has more than the model. Only the stages' hosts may have it.
    """
    if config.init is None or not os.path.exists(config.init):
        return None
    prefixes = [config.prefix_of(layer) for layer in unsplit]
    state = None
    if known is not None and not (config.cut and config.cut.in_init):  # some may be left out
        state = {*config.other_names} | {name for one in known.values() for name in one.state}
    files = WeightFiles(config.init)
    initial_weights.require_known_weights(files, prefixes, state)
    if known is None:
        return None
    stored = initial_weights.StoredNames.of(config, files)
    return {layer: stored.needed(named.state) for layer, named in known.items()}


def _layers_of_stages(config: Config) -> list[list[str]]:
    if config.model is None:
        return [[name] for name in config.stage_names]
    available = layers.chain_layers(config)
    balance = config.model.balance
    if balance == "auto":
        raise ConfigError('balance = "auto" has to be measured before stages can be planned')
    if balance is None:
        with init_at(config.init):
            sizes = layers.layer_sizes(available)
        balance = partition.balance_by_size(sizes, config.num_stages)
    return partition.cut_layers(list(available), balance)


def _try_out(config: Config, driver_metrics: Sequence[str]) -> None:
    """Build losses, optimizers and schedulers of torch or rpcmp, to find wrong arguments early.

    The user's own may need packages that only the stages' hosts have. They are built with the
    stages, when it also shows whether an optimizer takes the parameters.
    """
    weighing = {} if config.weighing is None else {"loss_weight": config.weighing}
    sources = {"loss": config.loss, **weighing} | {
        f"metrics.{name}": metric
        for name, metric in config.metrics.items()
        if name not in driver_metrics
    }
    for name, source in sources.items():
        if _is_everywhere(source):
            importing.load_function(source, name)
    for index, stage in enumerate(config.stage_names):
        device = config.stage(index).device
        try:
            devices.resolve_device(device)  # only the host knows whether it has it
        except RuntimeError as error:
            raise ConfigError(f"stage {stage!r}: device = {device!r}: {one_line(error)}") from error
        _try_optimizer(config, index)


def _try_optimizer(config: Config, index: int) -> None:
    source, schedule = config.optimizer_of(index), config.scheduler_of(index)
    if not _is_everywhere(source):
        return
    own, of_stage = config.stage(index), f" of stage {config.stage_names[index]!r}"
    name = f"optimizer{of_stage if own.optimizer else ''}"
    optimizer = optimizers.create(source, {"": nn.Parameter(torch.zeros(1, 1))}, name)
    if schedule is not None and _is_everywhere(schedule):
        importing.create(schedule, f"scheduler{of_stage if own.scheduler else ''}", optimizer)


def _is_everywhere(source: Factory) -> bool:
    return source.callable.partition(":")[0].partition(".")[0] in ("torch", "rpcmp")
