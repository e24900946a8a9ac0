"""The sections about a run: when it ends, what it keeps, who may talk to whom, how tensors travel.

They are `[early_stopping]`, `[loss_scaling]`, `[checkpoint]`, `[security]`, `[recovery]`,
`[transfer]` and `[log]`.
"""

from __future__ import annotations

import math
import re
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from rpcmp.config.types import Address, FactoryOrName, Positive, Strict

Mode: TypeAlias = Literal["min", "max"]

LOWER = {"loss", "error", "mae", "mse", "rmse", "nll", "perplexity", "wer", "cer"}
"""Words in the names of metrics for which less is better."""

HIGHER = {"accuracy", "acc", "f1", "auroc", "auc", "precision", "recall", "score", "iou", "r2"}
"""Words in the names of metrics for which more is better."""


def guess_direction(metric: str) -> Mode | None:
    """Return the direction that a metric's name suggests, or None."""
    # The last known word decides: an "f1_loss" is a loss.
    for word in reversed(re.split(r"[^a-z0-9]+", metric.lower())):
        if word in LOWER:
            return "min"
        if word in HIGHER:
            return "max"
    return None


def is_better(value: float, than: float | None, mode: Mode, by: float = 0.0) -> bool:
    """Return whether `value` is better than `than` by more than `by`; NaN never is."""
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value < than - by if mode == "min" else value > than + by


def _direction(key: str, metric: str, mode: Mode | None) -> Mode:
    """Return the mode that the config gives, or else the one that the metric's name suggests."""
    direction = mode or guess_direction(metric)
    if direction is None:
        raise ValueError(
            f'give `{key}` = "min" or "max": it is unknown whether lower or higher {metric!r} '
            "is better"
        )
    return direction


class EarlyStoppingConfig(Strict):
    metric: str = "loss"
    """The metric to watch: "loss", a metric, or a key of it ("name.key")."""
    mode: Mode | None = None
    """Whether lower or higher is better; by the metric's name when omitted."""
    patience: Positive = 3
    """Evaluations in a row without an improvement that end the run."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest change that counts as an improvement."""

    @property
    def direction(self) -> Mode:
        return _direction("mode", self.metric, self.mode)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _direction("mode", self.metric, self.mode)
        return self


class LossScalingConfig(Strict):
    """One scale for the loss of all stages; defaults as in `torch.amp.GradScaler`."""

    initial: float = Field(default=2.0**16, ge=1, le=2.0**126)
    """Initial factor of the loss."""
    growth_factor: float = Field(default=2.0, gt=1, allow_inf_nan=False)
    """The scale grows by it after `growth_interval` steps without a skipped one."""
    backoff_factor: float = Field(default=0.5, gt=0, lt=1)
    """The scale shrinks by it if a gradient is not finite; that step is skipped."""
    growth_interval: Positive = 2000
    """Steps in a row, none skipped, after which the scale grows."""


class CheckpointConfig(Strict):
    dir: str
    """Folder of the checkpoints; if relative, below the config's folder, and on another host below
    the folder that its server was started in."""
    every_steps: Positive | None = None
    """Steps between checkpoints."""
    every_seconds: float | None = Field(default=None, gt=0)
    """Seconds between checkpoints; 300 if neither is given."""
    keep: Positive = 3
    """Number of checkpoints to keep; older ones are removed."""
    best: str | None = None
    """Metric by which the step with the best evaluation is kept as well: "loss", a metric, or a key
    of it ("name.key")."""
    best_mode: Mode | None = None
    """Whether lower or higher is better; by the metric's name when omitted."""
    shared: bool = False
    """`dir` is one folder that all hosts see; else each stage has its files on its own host, and on
    its neighbour's."""

    on_error: Literal["fail", "warn"] = "fail"
    """If checkpoints cannot be written: "fail": the run ends after three in a row, and at its end
    if the last one is missing; "warn": it continues, and logs a warning."""

    @property
    def best_direction(self) -> Mode:
        return _direction("best_mode", self.best or "", self.best_mode)

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.best is not None:
            _direction("best_mode", self.best, self.best_mode)
        elif self.best_mode is not None:
            raise ValueError("`best_mode` needs `best`, the name of a metric")
        return self


class SecurityConfig(Strict):
    certs: str | None = None
    """Folder with the driver's ca.crt, tls.crt and tls.key."""
    insecure: bool = False
    """Talk to other machines without certificates."""
    confine: bool | None = None
    """Confine the driver's process, and the workers of servers that the job starts; the driver's
    process alone, if it has other servers, when omitted."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.certs is not None and self.insecure:
            raise ValueError("give `certs` or `insecure`, not both")
        return self


class RecoveryConfig(Strict):
    enabled: bool = True
    """Continue by itself after a fault."""
    mirror_every_steps: int = Field(default=1, ge=0)
    """Steps between snapshots that another stage's server holds as well: the most that a lost host
    costs; 0: each host holds only its own, after every step."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts without a new step after which a run gives up."""
    heartbeat_timeout: float = Field(default=6.0, ge=1)
    """Seconds without a heartbeat after which a worker is killed; one that is stopped, after a
    quarter of it."""
    watchdog: float = Field(default=600.0, ge=0)
    """Seconds without progress that count as a hang; 0: never."""
    replace_after: float = Field(default=60.0, ge=0)
    """Seconds after which a spare replaces a lost host."""
    give_up_after: float = Field(default=600.0, ge=0)
    """Seconds after which a run without a lost host ends."""
    keep_after_driver: float = Field(default=600.0, ge=0)
    """Seconds for which stage servers hold the newest steps of a run whose driver is lost, for
    `rpcmp drive --resume` on any host; 0: another job may take them at once."""
    keep_days: float = Field(default=14.0, ge=0)
    """Days after which a later run removes the checkpoint of one that had to give up; one that ends
    well and comes as far removes it at once."""
    spares: list[Address] = Field(default_factory=list)
    """HOST:PORT of servers that can take any stage."""

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.spares and self.replace_after >= self.give_up_after:
            raise ValueError(
                f"a run that gives up after {self.give_up_after:g} s (give_up_after) has no use "
                f"for spares after {self.replace_after:g} s (replace_after)"
            )
        return self


class TransferConfig(Strict):
    direct: bool = False
    """Tensors go from device to device, without a copy on the host, between stages of one host that
    can open each other's memory of CUDA or ROCm; each pair tries it first."""


class LogConfig(Strict):
    """Records of a run, and the loggers that get its events."""

    folder: str = "runs"
    """Each run keeps a folder of its own here, such as NAME-20261122-101500; "": none is kept."""
    tensorboard: str | None = Field(default=None, min_length=1)
    """Folder for TensorBoard; each run has a folder of its own in it."""
    loggers: list[FactoryOrName] = Field(default_factory=list)
    """Called with the config on the driver; each returns a function that gets every event."""
