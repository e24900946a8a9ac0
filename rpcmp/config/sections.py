"""The sections of a configuration, as strict models; `rpcmp.config.schema` puts them together.

Unknown keys are refused, so that a typo cannot silently fall back to a default.

Which of two values of a metric is the better one.
"""

from __future__ import annotations

import math
import re
from typing import Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from rpcmp.config import addresses
from rpcmp.config.topology import ReplicaAssignment
from rpcmp.config.types import (
    NAME,
    Arguments,
    Balance,
    Factory,
    FactoryOrName,
    Own,
    OwnOptimizer,
    Positive,
    Size,
    Strict,
    parse_size,
)
from rpcmp.errors import ConfigError

Mode: TypeAlias = Literal["min", "max"]

LOWER = {"loss", "error", "mae", "mse", "rmse", "nll", "perplexity", "wer", "cer"}
"""Words in the name of a metric of which less is better."""

HIGHER = {"accuracy", "acc", "f1", "auroc", "auc", "precision", "recall", "score", "iou", "r2"}
"""Words in the name of a metric of which more is better."""


def guess_direction(metric: str) -> Mode | None:
    """What a metric's name says; None where it says nothing.

    The last word decides: an "f1_loss" is a loss.
    """
    for word in reversed(re.split(r"[^a-z0-9]+", metric.lower())):
        if word in LOWER:
            return "min"
        if word in HIGHER:
            return "max"
    return None


def is_better(value: float, than: float | None, mode: Mode, by: float = 0.0) -> bool:
    """Whether `value` is better than another; one that is not a number never is.

    Args:
        than: None, where there is none yet.
        by: how much better it has to be, more than.
    """
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value < than - by if mode == "min" else value > than + by


class ModelConfig(Strict):
    """A model given as a list of layers."""

    layers: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$",
        description='"module:callable" that returns (name, zero-argument factory) pairs, a dict '
        "of them, or an nn.Sequential",
    )
    kwargs: Arguments = Field(default_factory=dict, description="arguments of `layers`")
    balance: Balance | None = Field(
        default=None,
        description='layers of each stage; "auto": measured on the hosts; by parameter count when '
        "omitted",
    )
    num_stages: Positive | None = Field(
        default=None, description="how many stages, where no balance says it"
    )


class StageConfig(Strict):
    """One stage. With `[model]`, tables go by position and only place and tune the stages."""

    name: str | None = Field(
        default=None, pattern=NAME, description='name; "stage<index>" when omitted'
    )
    module: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$",
        description='"module:callable" that returns the stage\'s nn.Module (without `[model]`)',
    )
    kwargs: Arguments = Field(default_factory=dict, description="arguments of `module`")
    prefix: str | None = Field(
        default=None,
        description="what the names of its parameters begin with in the unsplit model, such as "
        '"encoder"; "": with nothing, where `module` names them as that does; its own name when '
        "omitted",
    )
    inputs: list[str] | None = Field(
        default=None,
        description='what it reads: stages, "input", "target" or a part such as "input.image"; '
        "the stage before when omitted",
    )
    addresses: list[str] = Field(
        default_factory=list,
        description="HOST:PORT of its stage server, or of one for each replica; started on "
        "localhost when omitted",
    )
    replicas: Positive | None = Field(
        default=None,
        description="copies of the stage that share its micro-batches; one an address, or 1, when "
        "omitted",
    )
    shares: list[Positive] | None = Field(
        default=None,
        description="how the replicas share them, such as [3, 1]; equally when omitted",
    )
    device: str = Field(
        default="cpu",
        description='torch device of the stage, such as "cuda:0"; "auto": CUDA where its host has '
        "it, else the CPU",
    )
    threads: Positive = Field(default=1, description="compute threads (OpenMP, MKL)")
    memory: Size | None = Field(
        default=None,
        description='memory limit for `balance = "auto"`, such as "8 GiB"; the host\'s share when '
        "omitted",
    )
    optimizer: OwnOptimizer = Field(
        default_factory=dict,
        description="an optimizer of its own; or arguments that override `[optimizer]`'s, such as "
        "{ lr = 0.1 }",
    )
    scheduler: Own = Field(
        default_factory=dict,
        description="a learning-rate scheduler of its own; or arguments that override "
        "`[scheduler]`'s",
    )
    frozen: bool = Field(default=False, description="parameters are not trained")
    recompute: bool = Field(
        default=False,
        description="compute activations again in the backward instead of keeping them",
    )
    autocast: Literal["bfloat16", "float16", "float32"] | None = Field(
        default=None, description='instead of the job\'s `autocast`; "float32": none'
    )

    @property
    def num_replicas(self) -> int:
        """How many copies of the stage there are."""
        return self.replicas or len(self.addresses) or 1

    @property
    def turns(self) -> ReplicaAssignment:
        """Which of them computes which bundle of micro-batches."""
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
            said = ", ".join(f"{key} says {count}" for key, count in given.items())
            raise ValueError(f"how many replicas? {said}; give `replicas`, or one address each")
        return self

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit, where the config gives one."""
        return None if self.memory is None else parse_size(self.memory)


class DataConfig(Strict):
    """Where samples come from: map-style datasets, and how they become mini-batches."""

    train: FactoryOrName = Field(description="the training dataset")
    test: FactoryOrName | None = Field(default=None, description="the evaluation dataset")
    batch_size: Positive = Field(default=32, description="samples a mini-batch (optimizer step)")
    shuffle: bool = Field(default=True, description="a new seeded order in every epoch")
    drop_last: bool = Field(default=False, description="leave out an incomplete mini-batch")
    sampler: FactoryOrName | None = Field(
        default=None,
        description="called with the training dataset; returns a torch sampler, the indices of an "
        "epoch's samples in order, instead of `shuffle`; what it draws is seeded by the epoch",
    )
    collate: FactoryOrName | None = Field(
        default=None,
        description="function of a list of samples that makes a mini-batch of them, such as one "
        "that pads; torch's default_collate when omitted",
    )
    min_microbatch: Positive | None = Field(
        default=None,
        description="samples that a micro-batch has at least: fewer micro-batches are made where "
        "there are not enough; 2 where a stage trains batch normalization, else 1, when omitted",
    )
    num_workers: int = Field(
        default=0, ge=0, description="processes that load samples; at a stage one at least"
    )
    at: Literal["driver", "stage"] = Field(
        default="driver",
        description="who loads them: the driver, or on its own host each stage that reads the "
        "batch",
    )

    paths: list[str] = Field(
        default_factory=list,
        description="files and folders that the job's code reads, where it is confined: granted on "
        "the driver's host, and on a stage's if its server was started with `--data` of them; "
        "relative to the config's",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if (least := self.min_microbatch or 1) > self.batch_size:
            raise ValueError(
                f"min_microbatch = {least} is more than batch_size = {self.batch_size}"
            )
        return self

    @property
    def factories(self) -> dict[str, Factory]:
        """Where the datasets come from that there are, "train" and "test"."""
        return {"train": self.train, **({} if self.test is None else {"test": self.test})}

    @property
    def num_loaders(self) -> int:
        """Processes that load samples at each stage that reads the batch."""
        return max(1, self.num_workers)


def _direction(key: str, metric: str, mode: Mode | None) -> Mode:
    """Whether less or more of a metric is better.

    Raises:
        ValueError: nobody says so, nor does its name.
    """
    found = mode or guess_direction(metric)
    if found is None:
        raise ValueError(f'is less or more of {metric!r} better? give `{key}` = "min" or "max"')
    return found


class EarlyStoppingConfig(Strict):
    """`[early_stopping]`."""

    metric: str = Field(
        default="loss", description='what is watched: "loss", a metric, or a key of it ("name.key")'
    )
    mode: Mode | None = Field(
        default=None,
        description="whether less or more of it is better; by its name when omitted",
    )
    patience: Positive = Field(
        default=3, description="evaluations in a row without an improvement that end the run"
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="what an improvement has to be more than"
    )

    @property
    def direction(self) -> Mode:
        """Whether less or more of the metric is better."""
        return _direction("mode", self.metric, self.mode)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _direction("mode", self.metric, self.mode)
        return self


class LossScalingConfig(Strict):
    """One scale for the loss of all stages; the defaults are those of `torch.amp.GradScaler`."""

    initial: float = Field(
        default=2.0**16,
        ge=1,
        le=2.0**126,
        description="what the loss is multiplied by at first",
    )
    growth_factor: float = Field(
        default=2.0,
        gt=1,
        allow_inf_nan=False,
        description="the scale grows by it after `growth_interval` steps without a skipped one",
    )
    backoff_factor: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="the scale shrinks by it where a gradient is not finite; that step is skipped",
    )
    growth_interval: Positive = Field(
        default=2000, description="steps in a row, none skipped, after which the scale grows"
    )


class CheckpointConfig(Strict):
    """Checkpoints on disks."""

    dir: str = Field(description="folder of the checkpoints; relative to the config's")
    every_steps: Positive | None = Field(default=None, description="steps between checkpoints")
    every_seconds: float | None = Field(
        default=None,
        gt=0,
        description="seconds between checkpoints; 300 where neither is given",
    )
    keep: Positive = Field(default=3, description="how many are kept; older ones are removed")
    best: str | None = Field(
        default=None,
        description='"loss", a metric, or a key of it ("name.key"): the step with the best '
        "evaluation by it is kept as well",
    )
    best_mode: Mode | None = Field(
        default=None,
        description="whether less or more of it is better; by its name when omitted",
    )
    shared: bool = Field(
        default=False,
        description="`dir` is one folder that all hosts see; else each stage has its files on its "
        "own host, and on its neighbour's",
    )

    on_error: Literal["fail", "warn"] = Field(
        default="fail",
        description='where checkpoints cannot be written: "fail": the run ends after three in a '
        'row, and where the last one is missing at its end; "warn": it goes on, and says so',
    )

    @property
    def best_direction(self) -> Mode:
        """Whether less or more of the metric `best` is better."""
        return _direction("best_mode", self.best or "", self.best_mode)

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.best is not None:
            _direction("best_mode", self.best, self.best_mode)
        elif self.best_mode is not None:
            raise ValueError("`best_mode` of what? give `best`, the name of a metric")
        return self


class SecurityConfig(Strict):
    """`[security]`."""

    certs: str | None = Field(
        default=None, description="folder with the driver's ca.crt, tls.crt and tls.key"
    )
    insecure: bool = Field(default=False, description="talk to other machines without certificates")
    confine: bool | None = Field(
        default=None,
        description="confine the driver's process, and the workers of servers that the job starts; "
        "the driver's process alone, if it has other servers, when omitted",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.certs is not None and self.insecure:
            raise ValueError("give `certs` or `insecure`, not both")
        return self


class RecoveryConfig(Strict):
    """What happens when something is lost."""

    enabled: bool = Field(default=True, description="go on by itself after a fault")
    mirror_every_steps: int = Field(
        default=1,
        ge=0,
        description="steps between snapshots that another stage's server holds as well: the most "
        "that a lost host costs; 0: each host holds only its own, after every step",
    )
    max_restarts: int = Field(
        default=5, ge=0, description="restarts without a new step after which a run gives up"
    )
    heartbeat_timeout: float = Field(
        default=6.0,
        ge=1,
        description="seconds without a sign of life after which a worker is ended",
    )
    watchdog: float = Field(
        default=600.0,
        ge=0,
        description="seconds without any progress that count as a hang; 0: none",
    )
    replace_after: float = Field(
        default=60.0, ge=0, description="seconds after which a spare replaces a lost host"
    )
    give_up_after: float = Field(
        default=600.0, ge=0, description="seconds after which a run without a lost host ends"
    )
    keep_days: float = Field(
        default=14.0,
        ge=0,
        description="days after which a later run removes the checkpoint of one that had to give "
        "up; one that ends well and comes as far removes it at once",
    )
    spares: list[str] = Field(
        default_factory=list, description="HOST:PORT of servers that can take any stage"
    )

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.spares and self.replace_after >= self.give_up_after:
            raise ValueError(
                f"a run that gives up after {self.give_up_after:g} s (give_up_after) has no use "
                f"for spares after {self.replace_after:g} s (replace_after)"
            )
        return self

    @field_validator("spares")
    @classmethod
    def _check_spares(cls, spares: list[str]) -> list[str]:
        for address in spares:
            try:
                addresses.parse(address)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return spares


class LogConfig(Strict):
    """What is kept of a run, and who else is told of it."""

    folder: str = Field(
        default="runs",
        description='each run keeps a folder of its own here, such as NAME-20261122-101500; "": '
        "none is kept",
    )
    tensorboard: str | None = Field(
        default=None,
        min_length=1,
        description="folder for TensorBoard; each run has its own in it",
    )
    loggers: list[FactoryOrName] = Field(
        default_factory=list,
        description="called with the config on the driver; each returns a function that is told of "
        "every event",
    )
