"""The top-level keys of a job, and the sections `[model]`, `[[stages]]` and `[data]`.

`rpcmp.config.run_sections` has the other sections.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rpcmp.config.run_sections import (
    CheckpointConfig,
    EarlyStoppingConfig,
    LogConfig,
    LossScalingConfig,
    RecoveryConfig,
    SecurityConfig,
    TransferConfig,
)
from rpcmp.config.topology import ReplicaAssignment
from rpcmp.config.types import (
    CALLABLE,
    NAME,
    Address,
    Arguments,
    Auto,
    Autocast,
    Balance,
    Factory,
    FactoryOrName,
    OptimizerFactory,
    OptimizerOrName,
    Positive,
    PositiveOrAuto,
    Schedule,
    Size,
    StageOverride,
    Strict,
    parse_size,
)


class ModelConfig(Strict):
    """A model: an nn.Module as it is, which is cut, or a list of layers."""

    module: str | None = Field(default=None, pattern=CALLABLE)
    """The "module:callable" that returns an nn.Module, which is cut into layers."""
    layers: str | None = Field(default=None, pattern=CALLABLE)
    """Instead of `module`: the "module:callable" that returns (name, zero-argument factory) pairs,
    a dict of them, or an nn.Sequential."""
    kwargs: Arguments = Field(default_factory=dict)
    """Arguments of `module` or `layers`."""
    split: list[str] | None = None
    """Names of the submodules of `module` that become layers, such as ["encoder.layer.*", "head"];
    the outermost repeated blocks when omitted."""
    inputs: list[str] | None = None
    """Parts of a batch that is a dict which `module` is called with; all that it takes, without
    "labels", when omitted."""
    balance: Balance | None = None
    """Layers of each stage; "auto": measured on the hosts; by parameter count when omitted."""
    num_stages: Positive | None = None
    """Number of stages, if `balance` does not give it."""

    @property
    def source(self) -> str:
        """The callable: `module` or `layers`."""
        return self.module or self.layers or ""

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.module is None) == (self.layers is None):
            raise ValueError("give `module`, an nn.Module that is cut, or `layers`: one of them")
        given = {"split": self.split is not None, "inputs": self.inputs is not None}
        for key, is_given in given.items():
            if self.module is None and is_given:
                raise ValueError(f"`{key}` goes with `module`, and this model has `layers`")
        return self


class Passing(Strict):
    """What passes from a layer to the next.

    Attributes:
        values: such as "float32[*, *, 32]", sizes that vary as "*".
        sample_bytes: of all, per sample.
    """

    values: list[str]
    sample_bytes: int


class ModelCut(Strict):
    """How the `module` of a [model] is cut: found before a run, and never written into a config.

    Attributes:
        layers: names of the layers.
        passing: into each layer but the first.
        tied: names of one parameter in several layers.
        aliases: further names of a tensor, which no layer has, by the one that is stored.
        in_init: the names in the file of `init`, by names in the module, of what
            `rpcmp.from_init` builds; empty if that is all.
        base: of these, the frozen ones, which only `init` has: no snapshot and no checkpoint.
        split: a `rpcmp.splitting.split.Split`, packed.
        uncompared: None if the whole module was compared with its layers; else, of a module that is
            too large for that, the parts that were not compared either.
    """

    layers: list[str]
    passing: list[Passing] = Field(default_factory=list)
    tied: list[list[str]] = Field(default_factory=list)
    aliases: dict[str, list[str]] = Field(default_factory=dict)
    in_init: dict[str, list[str]] = Field(default_factory=dict)
    base: list[str] = Field(default_factory=list)
    split: str
    uncompared: list[str] | None = None


class StageConfig(Strict):
    """One stage. With `[model]`, tables go by position and only place and tune the stages."""

    name: str | None = Field(default=None, pattern=NAME)
    """Name; "stage<index>" when omitted."""
    module: str | None = Field(default=None, pattern=CALLABLE)
    """The "module:callable" that returns the stage's nn.Module (without `[model]`)."""
    kwargs: Arguments = Field(default_factory=dict)
    """Arguments of `module`."""
    prefix: str | None = None
    """What the names of its parameters begin with in the unsplit model, such as "encoder"; "": with
    nothing, where `module` names them as that does; its own name when omitted."""
    inputs: list[str] | None = None
    """What it reads: stages, "input", "target" or a part such as "input.image"; the stage before
    when omitted."""
    addresses: list[Address] = Field(default_factory=list)
    """HOST:PORT of its stage server, or of one for each replica; started on localhost when
    omitted."""
    replicas: Positive | None = None
    """Copies of the stage that share its micro-batches; one an address, or 1, when omitted."""
    shares: list[Positive] | None = None
    """How the replicas share them, such as [3, 1]; equally when omitted."""
    device: str = "cpu"
    """Torch device of the stage, such as "cuda:0"; "auto": one of its host's accelerator (CUDA,
    ROCm, XPU and others), another for each stage and replica there, or the CPU where there is none.
    """
    threads: Positive = 1
    """Compute threads (OpenMP, MKL)."""
    memory: Size | None = None
    """Memory limit for `balance = "auto"`, such as "8 GiB"; the host's share when omitted."""
    optimizer: StageOverride[OptimizerFactory] = Field(default_factory=dict)
    """An optimizer of its own; or arguments that override `[optimizer]`'s, such as { lr = 0.1 }."""
    scheduler: StageOverride[Factory] = Field(default_factory=dict)
    """A learning-rate scheduler of its own; or arguments that override `[scheduler]`'s."""
    frozen: bool = False
    """Parameters are not trained."""
    recompute: bool = False
    """Compute activations again in the backward instead of keeping them."""
    autocast: Literal["bfloat16", "float16", "float32"] | None = None
    """Instead of the job's `autocast`; "float32": none."""
    compile: bool | None = None
    """Instead of the job's `compile`."""

    @property
    def num_replicas(self) -> int:
        return self.replicas or len(self.addresses) or 1

    @property
    def turns(self) -> ReplicaAssignment:
        """The replica that computes each bundle of micro-batches."""
        return ReplicaAssignment(self.shares or [1] * self.num_replicas)

    @field_validator("prefix")
    @classmethod
    def _check_prefix(cls, prefix: str | None) -> str | None:
        if prefix and not all(prefix.removesuffix(".").split(".")):
            raise ValueError(
                "write a module's name in the unsplit model, with one dot between its parts, such "
                'as "encoder" or "encoder.0"; "" for the model itself'
            )
        return prefix

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        counts = {
            "replicas": self.replicas,
            "addresses": len(self.addresses) or None,
            "shares": None if self.shares is None else len(self.shares),
        }
        given = {key: count for key, count in counts.items() if count is not None}
        if len(set(given.values())) > 1 or (self.shares is not None and len(given) == 1):
            counted = ", ".join(f"{key} gives {count}" for key, count in given.items())
            raise ValueError(
                f"unclear number of replicas: {counted}; give `replicas`, or one address each"
            )
        return self

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_size(self.memory)


class DataConfig(Strict):
    """Datasets of samples, with indices or streams, and how they become mini-batches."""

    train: FactoryOrName
    """The training dataset."""
    test: FactoryOrName | None = None
    """The evaluation dataset."""
    batch_size: Positive = 32
    """Samples a mini-batch (optimizer step)."""
    shuffle: bool = True
    """A new seeded order in every epoch; a stream has its own."""
    drop_last: bool = False
    """Leave out an incomplete mini-batch."""
    sampler: FactoryOrName | None = None
    """Called with the training dataset; returns a torch sampler, the indices of an epoch's samples
    in order, instead of `shuffle`; what it draws is seeded by the epoch."""
    collate: FactoryOrName | None = None
    """Function of a list of samples that makes a mini-batch of them, such as one that pads; torch's
    default_collate when omitted."""
    min_microbatch: Positive | None = None
    """Samples that a micro-batch has at least: fewer micro-batches are made where there are not
    enough; 2 where a stage trains batch normalization, else 1, when omitted."""
    num_workers: int = Field(default=0, ge=0)
    """Processes that load samples; at a stage one at least. They share a stream."""
    at: Literal["driver", "stage"] = "driver"
    """Who loads them: the driver, or on its own host each stage that reads the batch."""

    paths: list[str] = Field(default_factory=list)
    """Files and folders that the job's code reads, where it is confined: granted on the driver's
    host, and on a stage's if its server was started with `--data` of them; relative to the
    config's."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if (least := self.min_microbatch or 1) > self.batch_size:
            raise ValueError(
                f"min_microbatch = {least} is more than batch_size = {self.batch_size}"
            )
        return self

    @property
    def factories(self) -> dict[str, Factory]:
        """The factories of the datasets that the config has, by "train" and "test"."""
        return {"train": self.train, **({} if self.test is None else {"test": self.test})}

    @property
    def num_loaders(self) -> int:
        """Loader processes per stage that reads the batch."""
        return max(1, self.num_workers)


class JobSettings(Strict):
    """The keys of a job: its own, and its sections."""

    name: str = Field(default="job", pattern=NAME)
    """The job's name; the file's stem."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    """Seed of all random numbers of the run."""
    epochs: Positive | None = None
    """Passes over the data; 1 by default."""
    steps: Positive | None = None
    """Optimizer steps, instead of epochs."""
    num_microbatches: Positive = 4
    """Slices of a mini-batch."""
    schedule: Literal[Schedule, Auto] = "auto"
    """Order of forwards and backwards; "auto": what is fastest in the run's first steps."""
    max_in_flight: PositiveOrAuto | None = "auto"
    """Micro-batches of which a stage may hold activations, in whole messages; "auto": as many as
    the schedule needs, or more where memory allows it and a step is faster."""
    microbatches_per_message: PositiveOrAuto = "auto"
    """Micro-batches that stages send in one message; "auto": what is fastest in the run's first
    steps, or 1 with replicas, whose sums it would change."""
    balance_replicas: bool = False
    """Give a stage's replicas `shares` by their measured speed, if it has none."""
    rebalance: Literal["off", "suggest", "auto"] = "off"
    """If a host becomes slower or faster for good: "auto": move layers between two steps, if that
    pays back within `rebalance_within` steps; "suggest": warn, and give the command."""
    rebalance_within: Positive = 1000
    """Steps within which moving layers has to gain more time than it takes."""
    wire_dtype: Literal["bfloat16"] | None = None
    """Float32 activations and gradients travel between stages as this."""
    autocast: Autocast | None = None
    """Compute in this what `torch.autocast` computes in it; parameters stay as they are."""
    compile: bool = False
    """Compile each layer by `torch.compile`; its host needs a C++ compiler."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Clip the gradient's norm over all stages."""
    evaluate_every: int | None = Field(default=None, ge=0)
    """Epochs between evaluations; 1 by default; 0: only at the end."""
    evaluate_every_steps: Positive | None = None
    """Steps between evaluations, instead of epochs."""
    ship_code: bool = True
    """Send the Python files beside the config to the stage servers."""
    planned_for: list[Address] = Field(default_factory=list)
    """HOST:PORT of the servers that `rpcmp plan` has made the config for; a run refuses others."""
    model: ModelConfig | None = None
    """The model, unless each of the `[[stages]]` has a module of its own."""
    stages: list[StageConfig] = Field(default_factory=list)
    """The stages, in order (`[[stages]]`)."""
    loss: FactoryOrName
    """Mean loss of (outputs, targets): a class such as torch.nn:CrossEntropyLoss, or a function."""
    loss_weight: FactoryOrName | None = None
    """What a micro-batch's mean loss counts: a function of its targets, such as
    rpcmp.losses:tokens, which leaves out padding. By default samples; the losses of rpcmp.losses
    bring theirs."""
    loss_scope: Literal["micro-batch"] | None = None
    """"micro-batch" says that the loss and the model are meant for each micro-batch by itself, also
    where it is not the same as for the whole mini-batch; else a run that differs there ends before
    its first step."""
    optimizer: OptimizerOrName = Field(
        default_factory=lambda: OptimizerFactory(callable="torch.optim:SGD", kwargs={"lr": 0.01})
    )
    """The optimizer; each stage has one of its own."""
    scheduler: FactoryOrName | None = None
    """Learning-rate scheduler; ReduceLROnPlateau watches the mean training loss."""
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    """When the scheduler steps."""
    metrics: dict[str, FactoryOrName] = Field(default_factory=dict)
    """By name: functions of (outputs, targets) that are means over samples, or classes with update,
    compute and reset, such as torchmetrics'."""
    report: FactoryOrName | None = None
    """Called with `predict` after training; its text is printed."""
    tied: list[list[str]] = Field(default_factory=list)
    """Parameters that are one, by their names in the unsplit model, such as [["embed.weight",
    "head.weight"]]; stored under the first name."""
    init: str | None = None
    """Weights to start from, by the unsplit model's names: a safetensors file, or a folder of such
    files as transformers writes it."""
    data: DataConfig | None = None
    """Needed by the command line."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stops the run when evaluations no longer improve."""
    loss_scaling: LossScalingConfig | None = None
    """Gradients of a scaled loss, which float16 does not lose; empty: as torch does."""
    checkpoint: CheckpointConfig | None = None
    """Checkpoints on disks."""
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    """Who may talk to whom."""
    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    """Recovery from lost workers, hosts and connections."""
    transfer: TransferConfig = Field(default_factory=TransferConfig)
    """How tensors travel between stages."""
    log: LogConfig = Field(default_factory=LogConfig)
    """What is kept of each run, and which loggers get its events."""
