"""The configuration: what a job is, as strict models.

Unknown keys are refused, so that a typo cannot silently fall back to a default. Nothing here
imports torch: supervisors and the command line read configs in milliseconds. Whatever the config
names as "module:callable" is imported later, where it is needed (`rpcmp.config.importing`).

What of a job may change between two steps while its processes go on.

How a mini-batch is cut, and in which order its micro-batches are worked on. Models, stages and
workers stay as they are, so that `rpcmp tune` compares settings on the same processes, step by step
in turn. Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from rpcmp.config import validation
from rpcmp.config.sections import (
    CheckpointConfig,
    DataConfig,
    EarlyStoppingConfig,
    LogConfig,
    LossScalingConfig,
    ModelConfig,
    RecoveryConfig,
    SecurityConfig,
    StageConfig,
)
from rpcmp.config.topology import Graph, Member, ReplicaAssignment, build_graph, chain_graph
from rpcmp.config.types import (
    NAME,
    Autocast,
    Factory,
    FactoryOrName,
    OptimizerFactory,
    OptimizerOrName,
    Positive,
    Schedule,
    Strict,
)
from rpcmp.errors import ConfigError


class Config(Strict):
    """A job."""

    name: str = Field(default="job", pattern=NAME, description="the job's name; the file's stem")
    seed: int = Field(default=0, description="rules every random number of the run")
    epochs: Positive | None = Field(default=None, description="passes over the data; 1 by default")
    steps: Positive | None = Field(default=None, description="optimizer steps, instead of epochs")
    num_microbatches: Positive = Field(default=4, description="slices of a mini-batch")
    schedule: Schedule = Field(default="1f1b", description="order of forwards and backwards")
    max_in_flight: Positive | None = Field(
        default=None,
        description="micro-batches of which a stage may hold activations, in whole messages; by "
        "the schedule when omitted",
    )
    microbatches_per_message: Positive = Field(
        default=1,
        description="micro-batches that travel between stages in one message; worth trying where a "
        "stage computes one in a few milliseconds",
    )
    balance_replicas: bool = Field(
        default=False,
        description="give a stage's replicas `shares` by their measured speed, where it has none",
    )
    wire_dtype: Literal["bfloat16"] | None = Field(
        default=None,
        description="float32 activations and gradients travel between stages as this",
    )
    autocast: Autocast | None = Field(
        default=None,
        description="compute in this what `torch.autocast` computes in it; parameters stay as they "
        "are",
    )
    max_grad_norm: float | None = Field(
        default=None, gt=0, description="clip the gradient's norm over all stages"
    )
    evaluate_every: int | None = Field(
        default=None,
        ge=0,
        description="epochs between evaluations; 1 by default; 0: only at the end",
    )
    evaluate_every_steps: Positive | None = Field(
        default=None, description="steps between evaluations, instead of epochs"
    )
    ship_code: bool = Field(
        default=True, description="send the Python files beside the config to the stage servers"
    )
    model: ModelConfig | None = Field(default=None, description="a model as a list of layers")
    stages: list[StageConfig] = Field(
        default_factory=list, description="the stages, in order (`[[stages]]`)"
    )
    loss: FactoryOrName = Field(
        description="mean loss of (outputs, targets): a class such as torch.nn:CrossEntropyLoss, "
        "or a function"
    )
    optimizer: OptimizerOrName = Field(
        default_factory=lambda: OptimizerFactory(callable="torch.optim:SGD", kwargs={"lr": 0.01}),
        description="the optimizer; each stage has one of its own",
    )
    scheduler: FactoryOrName | None = Field(default=None, description="learning-rate scheduler")
    scheduler_interval: Literal["epoch", "step"] = Field(
        default="epoch", description="when the scheduler steps"
    )
    metrics: dict[str, FactoryOrName] = Field(
        default_factory=dict,
        description="by name: functions of (outputs, targets) that are means over samples, or "
        "classes with update, compute and reset, such as torchmetrics'",
    )
    report: FactoryOrName | None = Field(
        default=None, description="called with `predict` after training; its text is printed"
    )
    tied: list[list[str]] = Field(
        default_factory=list,
        description="parameters that are one, by their names in the unsplit model, such as "
        '[["embed.weight", "head.weight"]]; stored under the first name',
    )
    init: str | None = Field(
        default=None,
        description="safetensors file with the weights to start from, by the unsplit model's names",
    )
    data: DataConfig | None = Field(default=None, description="needed by the command line")
    early_stopping: EarlyStoppingConfig | None = Field(
        default=None, description="ends the run when evaluations do not get better any more"
    )
    loss_scaling: LossScalingConfig | None = Field(
        default=None,
        description="gradients of a scaled loss, which float16 does not lose; empty: as torch does",
    )
    checkpoint: CheckpointConfig | None = Field(default=None, description="checkpoints on disks")
    security: SecurityConfig = Field(
        default_factory=SecurityConfig, description="who may talk to whom"
    )
    recovery: RecoveryConfig = Field(
        default_factory=RecoveryConfig, description="what happens when something is lost"
    )
    log: LogConfig = Field(
        default_factory=LogConfig, description="what is kept of each run, and who else is told"
    )

    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def folder(self) -> Path:
        """Where the config lies; the user's Python files are looked for here."""
        return self._folder

    def with_folder(self, folder: Path) -> Self:
        """A copy of this config that lies in `folder`, and with it the file of `init`."""
        folder = folder.resolve()
        init = None if self.init is None else str(folder / self.init)
        copy = self.model_copy(update={"init": init})
        copy._folder = folder
        return copy

    def require_data(self, use: str) -> DataConfig:
        """The `[data]` section.

        Args:
            use: what needs it, such as "training".

        Raises:
            ConfigError: there is none.
        """
        if self.data is None:
            raise ConfigError(
                f"the config has no [data] section, which {use} needs: give it `train`"
            )
        return self.data

    @property
    def num_full_microbatches(self) -> int:
        """Micro-batches of a step; there is none without a sample."""
        most, section = self.num_microbatches, self.data
        if section is None:
            return most
        return min(most, section.batch_size // (section.min_microbatch or 1))

    @property
    def num_stages(self) -> int:
        """How many stages the job has."""
        if self.model is None or self.stages:
            return len(self.stages)
        balance = self.model.balance
        counted = len(balance) if isinstance(balance, list) else 0
        return counted or self.model.num_stages or 1

    @property
    def is_balanced_by_measurement(self) -> bool:
        """Whether the balance is "auto": known only when the hosts have been asked."""
        return self.model is not None and self.model.balance == "auto"

    def with_balance(self, balance: list[int]) -> Self:
        """A copy of this config with these layers a stage.

        Raises:
            ConfigError: the model is no list of layers.
        """
        if self.model is None:
            raise ConfigError("only a job with [model] has a balance")
        model = self.model.model_copy(update={"balance": balance})
        return self.model_copy(update={"model": model})

    def with_shares(self, shares: Mapping[int, list[int]]) -> Self:
        """A copy of this config with these `shares`, by the stage's index."""
        stages = [
            stage.model_copy(update={"shares": shares[index]}) if index in shares else stage
            for index, stage in enumerate(self.stages)
        ]
        return self.model_copy(update={"stages": stages})

    @property
    def stage_names(self) -> list[str]:
        """Names of the stages, in the config's order."""
        named = [stage.name for stage in self.stages] or [None] * self.num_stages
        return [name or f"stage{index}" for index, name in enumerate(named)]

    @property
    def workers(self) -> list[Member]:
        """Every replica of every stage, in the config's order."""
        return [
            Member(name, index, replica, self.stage(index).num_replicas)
            for index, name in enumerate(self.stage_names)
            for replica in range(self.stage(index).num_replicas)
        ]

    @property
    def is_replicated(self) -> bool:
        """Whether any stage has more than one replica."""
        return any(stage.num_replicas > 1 for stage in self.stages)

    @property
    def sums_gradients(self) -> bool:
        """Whether workers have to put their gradients together before a step."""
        return self.is_replicated or bool(self.tied)

    @property
    def tied_to(self) -> dict[str, str]:
        """For each parameter that is tied to another one the name of that, which is the first."""
        return {name: first for first, *others in self.tied for name in others}

    @property
    def shares(self) -> dict[str, list[int]]:
        """How the replicas of each stage that has several share its micro-batches, by its name."""
        pairs = zip(self.stage_names, self.stages, strict=False)
        return {
            name: stage.shares or [1] * stage.num_replicas
            for name, stage in pairs
            if stage.num_replicas > 1
        }

    @property
    def warnings(self) -> list[str]:
        """What is allowed and hardly meant."""
        return validation.warnings(self)

    @property
    def addresses(self) -> list[str]:
        """The stage servers' addresses, by worker; empty when they are to be started here."""
        return [address for stage in self.stages for address in stage.addresses]

    @property
    def modules(self) -> set[str]:
        """The modules of all callables that the job names."""
        given = [self.loss, self.optimizer, self.scheduler, self.report, *self.metrics.values()]
        for index in range(self.num_stages):
            given += [self.optimizer_of(index), self.scheduler_of(index)]
        if self.data is not None:
            given += [self.data.train, self.data.test, self.data.sampler, self.data.collate]
        names = [factory.callable for factory in given if factory is not None]
        names += [stage.module for stage in self.stages if stage.module is not None]
        if self.model is not None:
            names.append(self.model.layers)
        return {name.partition(":")[0] for name in names}

    @property
    def takes_snapshots(self) -> bool:
        """Whether stages keep in memory what they were after their last steps."""
        return self.recovery.enabled or self.checkpoint is not None

    @property
    def snapshot_every_steps(self) -> int:
        """Steps between snapshots; 0: only those that go to a disk."""
        return max(1, self.recovery.mirror_every_steps) if self.recovery.enabled else 0

    @property
    def evaluate_every_epochs(self) -> int:
        """Epochs between evaluations; 0: none follows an epoch but the last."""
        if self.evaluate_every is not None:
            return self.evaluate_every
        return 0 if self.evaluate_every_steps is not None else 1

    @property
    def watched(self) -> dict[str, str]:
        """The metrics by which something is decided, by the keys that name them."""
        found = {}
        if self.early_stopping is not None:
            found["early_stopping.metric"] = self.early_stopping.metric
        if self.checkpoint is not None and self.checkpoint.best is not None:
            found["checkpoint.best"] = self.checkpoint.best
        return found

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints lie; without a section for them, those of a run that had to end."""
        given = self.checkpoint.dir if self.checkpoint is not None else f"rpcmp-{self.name}"
        return (self.folder / given).absolute()

    @property
    def log_folder(self) -> Path | None:
        """Where each run keeps a folder of its own; None: nowhere."""
        return (self.folder / self.log.folder).absolute() if self.log.folder else None

    @property
    def tensorboard_folder(self) -> Path | None:
        """Where each run keeps a folder for TensorBoard; None: nowhere."""
        given = self.log.tensorboard
        return None if given is None else (self.folder / given).absolute()

    @property
    def data_paths(self) -> list[str]:
        """What the job's code reads besides its own files: `data.paths`, and the file of `init`."""
        given = [] if self.data is None else self.data.paths
        paths = [str((self.folder / Path(path).expanduser()).absolute()) for path in given]
        return paths + ([] if self.init is None else [str((self.folder / self.init).absolute())])

    @property
    def certs_folder(self) -> Path | None:
        """Where the driver's certificate lies; None: it has none."""
        certs = self.security.certs
        return None if certs is None else (self.folder / certs).absolute()

    def without_recovery(self) -> Self:
        """A copy of this config that keeps nothing, to be measured."""
        recovery = self.recovery.model_copy(update={"enabled": False})
        return self.model_copy(update={"recovery": recovery, "checkpoint": None})

    def without_evaluation(self) -> Self:
        """A copy of this config that trains and does nothing else with what it has trained."""
        data = self.data and self.data.model_copy(update={"test": None})
        gone = dict.fromkeys(("report", "evaluate_every_steps", "early_stopping", "checkpoint"))
        return self.model_copy(update={**gone, "metrics": {}, "data": data})

    def steps_scheduler(self, interval: Literal["epoch", "step"]) -> bool:
        """Whether any stage has a scheduler that steps after each `interval`."""
        return self.has_schedulers and self.scheduler_interval == interval

    @property
    def holds_steps(self) -> bool:
        """Whether the driver looks at all stages before they step: at the gradients or the loss.

        Of the schedulers that step with the optimizer, only torch's own are known not to do so.
        """
        may_watch = self.steps_scheduler("step") and any(map(_may_watch, self._schedulers))
        return self.max_grad_norm is not None or self.loss_scaling is not None or may_watch

    def stage(self, index: int) -> StageConfig:
        """The settings of one stage; defaults where the config has no table for it."""
        return self.stages[index] if self.stages else StageConfig()

    def prefix_of(self, layer: str) -> str:
        """What a layer's parameters begin with in the unsplit model; with its dot."""
        if self.model is None:
            prefix = self.stage(self.stage_names.index(layer)).prefix
            if prefix is not None:
                return f"{prefix.rstrip('.')}." if prefix else ""
        return f"{layer}."

    @property
    def names_parameters(self) -> bool:
        """Whether it says anything by names of the unsplit model's parameters."""
        groups = any(self.optimizer_of(index).groups for index in range(self.num_stages))
        return bool(self.tied) or groups or any(s.prefix is not None for s in self.stages)

    def autocast_of(self, index: int) -> Autocast | None:
        """What a stage computes in under `torch.autocast`: its own choice, or else the job's."""
        own = self.stage(index).autocast or self.autocast
        return None if own == "float32" else own

    def turns_of(self, stage_name: str) -> ReplicaAssignment:
        """Which replica of a stage computes which bundle of micro-batches."""
        return self.stage(self.stage_names.index(stage_name)).turns

    def optimizer_of(self, index: int) -> OptimizerFactory:
        """The optimizer of one stage: its own, or the job's with the stage's arguments."""
        return self.optimizer.adapted(self.stage(index).optimizer).with_tied(self.tied)

    def scheduler_of(self, index: int) -> Factory | None:
        """The scheduler of one stage: its own, or the job's with the stage's arguments, if any."""
        own = self.stage(index).scheduler
        if self.scheduler is None:
            return own if isinstance(own, Factory) else None
        return self.scheduler.adapted(own)

    @property
    def has_schedulers(self) -> bool:
        """Whether any stage has one."""
        return bool(self._schedulers)

    @property
    def _schedulers(self) -> list[Factory]:
        found = map(self.scheduler_of, range(self.num_stages))
        return [scheduler for scheduler in found if scheduler is not None]

    def without_schedulers(self) -> Self:
        """A copy of this config whose learning rates stay as they are."""
        stages = [stage.model_copy(update={"scheduler": {}}) for stage in self.stages]
        return self.model_copy(update={"scheduler": None, "stages": stages})

    def without_mixed_precision(self) -> Self:
        """A copy of this config without autocast and loss scaling."""
        stages = [stage.model_copy(update={"autocast": None}) for stage in self.stages]
        return self.model_copy(update={"autocast": None, "loss_scaling": None, "stages": stages})

    def graph(self) -> Graph:
        """Which stage reads what.

        Raises:
            ConfigError: the inputs do not form a graph with one sink.
        """
        if not any(stage.inputs for stage in self.stages):
            return chain_graph(self.stage_names)
        sources = ["input", *self.stage_names[:-1]]
        inputs = {
            name: self.stage(index).inputs or [sources[index]]
            for index, name in enumerate(self.stage_names)
        }
        return build_graph(inputs)

    @model_validator(mode="after")
    def _check(self) -> Self:
        validation.check(self)
        return self


def _may_watch(scheduler: Factory) -> bool:
    """Whether it may look at the loss: of torch's own only one does."""
    name = scheduler.callable
    return not name.startswith("torch.optim") or name.endswith("ReduceLROnPlateau")


class ScheduleOptions(Strict):
    """One choice of them; the keys are those of the config."""

    num_microbatches: Positive
    schedule: Schedule
    max_in_flight: Positive | None = None
    microbatches_per_message: Positive = 1

    @classmethod
    def of(cls, config: Config) -> Self:
        """The config's own."""
        return cls(**{key: getattr(config, key) for key in cls.model_fields})

    def on(self, config: Config) -> Config:
        """`config` with this setting."""
        return config.model_copy(update=self.model_dump())

    @property
    def way(self) -> str:
        """All but the number of micro-batches."""
        in_flight = "" if self.max_in_flight is None else f", max_in_flight {self.max_in_flight}"
        count = self.microbatches_per_message
        return f"{self.schedule}{in_flight}{'' if count == 1 else f', {count} a message'}"

    def __str__(self) -> str:
        plural = "" if self.num_microbatches == 1 else "es"
        return f"{self.num_microbatches} micro-batch{plural}, {self.way}"
