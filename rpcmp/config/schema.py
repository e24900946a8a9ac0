"""The configuration of a job, and what follows from it.

Unknown keys are refused, so that a typo cannot silently fall back to a default. Nothing here
imports torch: supervisors and the command line read configs in milliseconds. What a config names as
"module:callable" is imported later, by the process that needs it (`rpcmp.config.importing`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import PrivateAttr, model_validator

from rpcmp.config import cross_checks
from rpcmp.config.job_sections import DataConfig, JobSettings, ModelCut, StageConfig
from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.topology import (
    Graph,
    Member,
    ReplicaAssignment,
    build_graph,
    cut_into_bundles,
)
from rpcmp.config.types import (
    COPY,
    Autocast,
    Factory,
    OptimizerFactory,
)
from rpcmp.errors import ConfigError

WEIGHS = {
    "rpcmp.losses:causal_lm": "rpcmp.losses:next_tokens",
    "rpcmp.losses:masked_lm": "rpcmp.losses:tokens",
}
"""What weighs the micro-batches of our own losses, if the config does not say."""

DEFAULTS = StageConfig()
"""The section of each stage of a config that has none."""


class Config(JobSettings):
    """A job.

    Attributes:
        cut: of the `module` of its [model], once it was cut; no file has it.
    """

    cut: ModelCut | None = None
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def folder(self) -> Path:
        """The folder of the config, in which the user's Python files are looked for."""
        return self._folder

    def with_folder(self, folder: Path) -> Self:
        """Return a copy whose relative paths, such as `init`, start at `folder`."""
        folder = folder.resolve()
        init = None if self.init is None else str(folder / os.path.expanduser(self.init))
        copy = self.model_copy(update={"init": init})
        copy._folder = folder
        return copy

    def require_data(self, use: str) -> DataConfig:
        """Return the `[data]` section, which `use` needs; raises ConfigError if there is none."""
        if self.data is None:
            raise ConfigError(
                f"the config has no [data] section, which {use} needs: give it `train`"
            )
        return self.data

    @property
    def weighing(self) -> Factory | None:
        """What a micro-batch's mean loss counts; None: its samples."""
        implied = WEIGHS.get(self.loss.callable)
        if self.loss_weight is not None or implied is None:
            return self.loss_weight
        kwargs = {key: value for key, value in self.loss.kwargs.items() if key == "ignore_index"}
        return Factory(callable=implied, kwargs=kwargs)

    @property
    def num_full_microbatches(self) -> int:
        """Micro-batches of a step whose mini-batch is full; each has a sample at least."""
        if self.data is None:
            return self.num_microbatches
        return min(self.num_microbatches, self.data.batch_size // (self.data.min_microbatch or 1))

    @property
    def has_equal_parts(self) -> bool:
        """Whether micro-batches have to be as good as the mini-batch that they are of."""
        return self.num_full_microbatches > 1 and self.loss_scope is None

    def with_full_microbatches(self) -> Self:
        """Return the job with as many micro-batches as its full mini-batches really have."""
        count = self.num_full_microbatches
        if count == self.num_microbatches:
            return self
        return self.model_copy(update={"num_microbatches": count})

    @property
    def num_stages(self) -> int:
        if self.model is None or self.stages:
            return len(self.stages)
        balance = self.model.balance
        counted = len(balance) if isinstance(balance, list) else 0
        return counted or self.model.num_stages or 1

    @property
    def is_balanced_by_measurement(self) -> bool:
        """Whether the balance is "auto", known only after the hosts have been measured."""
        return self.model is not None and self.model.balance == "auto"

    def with_balance(self, balance: list[int]) -> Self:
        """Return a copy with these numbers of layers per stage; needs a [model]."""
        if self.model is None:
            raise ConfigError("only a job with [model] has a balance")
        model = self.model.model_copy(update={"balance": balance})
        return self.model_copy(update={"model": model})

    @property
    def is_to_be_cut(self) -> bool:
        """Whether the model is an nn.Module that has not been cut yet."""
        return self.model is not None and self.model.module is not None and self.cut is None

    def with_cut(self, cut: ModelCut) -> Self:
        """Return a copy whose `module` is cut like this; its tied parameters are known then."""
        return self.model_copy(update={"cut": cut, "tied": [*self.tied, *cut.tied]})

    def with_shares(self, shares: Mapping[int, list[int]]) -> Self:
        """Return a copy whose stages give their replicas these shares of the micro-batches."""
        stages = [
            stage.model_copy(update={"shares": shares[index]}) if index in shares else stage
            for index, stage in enumerate(self.stages)
        ]
        return self.model_copy(update={"stages": stages})

    def with_measured_shares(self, shares: Mapping[int, list[int]]) -> Self:
        """Return a copy with earlier measured shares, where a stage has none and they fit it."""
        return self.with_shares(
            {
                index: shares[index]
                for index, stage in enumerate(self.stages)
                if index in shares
                and stage.shares is None
                and len(shares[index]) == stage.num_replicas
            }
        )

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
        return any(stage.num_replicas > 1 for stage in self.stages)

    @property
    def options(self) -> ScheduleOptions:
        """The schedule options, with the defaults for those that are "auto"."""
        return ScheduleOptions.of(self)

    def bundles(self, num_microbatches: int) -> tuple[range, ...]:
        """Return the micro-batches of each bundle of a mini-batch."""
        return cut_into_bundles(
            num_microbatches, self.options.microbatches_per_message, in_turns=self.is_replicated
        )

    @property
    def sums_gradients(self) -> bool:
        """Whether workers have to sum gradients with each other before a step."""
        return self.is_replicated or bool(self.tied)

    @property
    def tied_to(self) -> dict[str, str]:
        """The first name of each tied parameter, by its other names."""
        return {name: first for first, *others in self.tied for name in others}

    @property
    def base(self) -> frozenset[str]:
        """All names of frozen parameters that only `init` has: no snapshot and no checkpoint."""
        if self.cut is None or self.init is None:
            return frozenset()
        known = set(self.cut.base)
        known |= {name for name, first in self.tied_to.items() if first in known}
        return frozenset(known.union(*(self.cut.aliases.get(name, []) for name in known)))

    @property
    def other_names(self) -> dict[str, str]:
        """The stored name of what a state dict of the unsplit model has by other names, too."""
        names = {name: first for name, first in self.tied_to.items() if COPY not in name}
        aliases = {} if self.cut is None else self.cut.aliases
        for own, others in aliases.items():
            names |= dict.fromkeys(others, self.tied_to.get(own, own))
        base = self.base
        return {name: first for name, first in names.items() if first not in base}

    @property
    def shares(self) -> dict[str, list[int]]:
        """The shares of the replicas, by the name of each stage that has several."""
        pairs = zip(self.stage_names, self.stages, strict=False)
        return {
            name: stage.shares or [1] * stage.num_replicas
            for name, stage in pairs
            if stage.num_replicas > 1
        }

    @property
    def warnings(self) -> list[str]:
        """Settings that are allowed but probably not meant."""
        return cross_checks.warnings(self)

    @property
    def addresses(self) -> list[str]:
        """The stage servers' addresses, by worker; empty if they are to be started here."""
        return [address for stage in self.stages for address in stage.addresses]

    @property
    def modules(self) -> set[str]:
        factories = [self.loss, self.weighing, self.report, *self.metrics.values()]
        factories += [self.optimizer, self.scheduler]
        for index in range(self.num_stages):
            factories += [self.optimizer_of(index), self.scheduler_of(index)]
        if self.data is not None:
            factories += [self.data.train, self.data.test, self.data.sampler, self.data.collate]
        names = [factory.callable for factory in factories if factory is not None]
        names += [stage.module for stage in self.stages if stage.module is not None]
        if self.model is not None:
            names.append(self.model.source)
        return {name.partition(":")[0] for name in names}

    @property
    def takes_snapshots(self) -> bool:
        """Whether stages keep snapshots of their last steps in memory."""
        return self.recovery.enabled or self.checkpoint is not None

    @property
    def snapshot_every_steps(self) -> int:
        """Steps between snapshots; 0: only those that are saved to a disk are taken."""
        return max(1, self.recovery.mirror_every_steps) if self.recovery.enabled else 0

    @property
    def evaluate_every_epochs(self) -> int:
        """Epochs between evaluations; 0: only the last epoch is followed by one."""
        if self.evaluate_every is not None:
            return self.evaluate_every
        return 0 if self.evaluate_every_steps is not None else 1

    @property
    def decisive_metrics(self) -> dict[str, str]:
        """The metrics that decide something, by the config keys that name them."""
        metrics = {}
        if self.early_stopping is not None:
            metrics["early_stopping.metric"] = self.early_stopping.metric
        if self.checkpoint is not None and self.checkpoint.best is not None:
            metrics["checkpoint.best"] = self.checkpoint.best
        return metrics

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of the checkpoints; without [checkpoint], of a run that had to give up."""
        return (self.folder / self._checkpoint_dir).absolute()

    @property
    def relative_checkpoint_folder(self) -> str:
        """`checkpoint_folder` relative to the folder of the config; empty if `dir` is absolute."""
        folder = self._checkpoint_dir
        return "" if Path(folder).is_absolute() else folder

    @property
    def _checkpoint_dir(self) -> str:
        section = self.checkpoint
        return f"rpcmp-{self.name}" if section is None else os.path.expanduser(section.dir)

    @property
    def log_folder(self) -> Path | None:
        """Folder in which each run keeps one of its own; None: runs keep none."""
        return self._absolute(self.log.folder or None)

    @property
    def tensorboard_folder(self) -> Path | None:
        """Folder in which each run keeps one for TensorBoard; None: runs keep none."""
        return self._absolute(self.log.tensorboard)

    @property
    def data_paths(self) -> list[str]:
        """Absolute paths that the job's code reads besides its own files and `init`."""
        own = [] if self.data is None else self.data.paths
        return [str(self._absolute(path)) for path in own]

    @property
    def init_path(self) -> str:
        """The absolute path of `init`; empty: there is none."""
        return str(self._absolute(self.init) or "")

    @property
    def paths_read(self) -> list[str]:
        """All that the job's code reads on a host that has it, besides its own files."""
        return [*self.data_paths, *filter(None, [self.init_path])]

    @property
    def certs_folder(self) -> Path | None:
        """Folder of the driver's certificate, if it has one."""
        return self._absolute(self.security.certs)

    def _absolute(self, path: str | None) -> Path | None:
        return None if path is None else (self.folder / os.path.expanduser(path)).absolute()

    def without_recovery(self) -> Self:
        """Return a copy that keeps no snapshots and no checkpoints, for measurements."""
        recovery = self.recovery.model_copy(update={"enabled": False})
        return self.model_copy(update={"recovery": recovery, "checkpoint": None})

    def without_evaluation(self) -> Self:
        """Return a copy that trains but neither evaluates, reports nor saves."""
        data = self.data and self.data.model_copy(update={"test": None})
        unset = dict.fromkeys(("report", "evaluate_every_steps", "early_stopping", "checkpoint"))
        return self.model_copy(update={**unset, "metrics": {}, "data": data})

    def steps_scheduler(self, interval: Literal["epoch", "step"]) -> bool:
        """Whether any stage has a scheduler that steps after each `interval`."""
        return self.has_schedulers and self.scheduler_interval == interval

    @property
    def holds_steps(self) -> bool:
        """Whether the driver needs the gradients or the loss of all stages before they step.

        Schedulers that step with the optimizer may look at the loss, too; only torch's own are
        known not to.
        """
        may_watch = self.steps_scheduler("step") and any(map(_may_watch, self._schedulers))
        return self.max_grad_norm is not None or self.loss_scaling is not None or may_watch

    def stage(self, index: int) -> StageConfig:
        """Return the section of one stage; defaults if the config has none."""
        return self.stages[index] if self.stages else DEFAULTS

    def prefix_of(self, layer: str) -> str:
        """Return the prefix of a layer's, or named stage's, parameters in the unsplit model."""
        if self.cut is not None:
            return ""
        if self.model is None:
            prefix = self.stage(self.stage_names.index(layer)).prefix
            if prefix is not None:
                return f"{prefix.rstrip('.')}." if prefix else ""
        return f"{layer}."

    @property
    def refers_to_parameters(self) -> bool:
        """Whether the config names parameters of the unsplit model."""
        groups = any(self.optimizer_of(index).groups for index in range(self.num_stages))
        return bool(self.tied) or groups or any(s.prefix is not None for s in self.stages)

    def autocast_of(self, index: int) -> Autocast | None:
        """Return the dtype of a stage's `torch.autocast`: its own choice, or else the job's."""
        own = self.stage(index).autocast or self.autocast
        return None if own == "float32" else own

    def compiles(self, index: int) -> bool:
        """Return whether a stage compiles its layers: its own choice, or else the job's."""
        own = self.stage(index).compile
        return self.compile if own is None else own

    def turns_of(self, stage_name: str) -> ReplicaAssignment:
        return self.stage(self.stage_names.index(stage_name)).turns

    def optimizer_of(self, index: int) -> OptimizerFactory:
        """Return a stage's optimizer: its own, or the job's with the stage's arguments."""
        return self.optimizer.adapted(self.stage(index).optimizer).with_tied(self.tied)

    def scheduler_of(self, index: int) -> Factory | None:
        """Return a stage's scheduler: its own, or the job's with the stage's arguments."""
        own = self.stage(index).scheduler
        if self.scheduler is None:
            return own if isinstance(own, Factory) else None
        return self.scheduler.adapted(own)

    @property
    def has_schedulers(self) -> bool:
        return bool(self._schedulers)

    @property
    def _schedulers(self) -> list[Factory]:
        schedulers = map(self.scheduler_of, range(self.num_stages))
        return [scheduler for scheduler in schedulers if scheduler is not None]

    def without_schedulers(self) -> Self:
        """Return a copy whose learning rates stay as they are."""
        stages = [stage.model_copy(update={"scheduler": {}}) for stage in self.stages]
        return self.model_copy(update={"scheduler": None, "stages": stages})

    def without_mixed_precision(self) -> Self:
        stages = [stage.model_copy(update={"autocast": None}) for stage in self.stages]
        return self.model_copy(update={"autocast": None, "loss_scaling": None, "stages": stages})

    def graph(self) -> Graph:
        """Return the graph of the stages and their inputs."""
        sources = ["input", *self.stage_names[:-1]]
        inputs = {
            name: self.stage(index).inputs or [sources[index]]
            for index, name in enumerate(self.stage_names)
        }
        return build_graph(inputs)

    @model_validator(mode="after")
    def _check(self) -> Self:
        cross_checks.check(self)
        return self


def _may_watch(scheduler: Factory) -> bool:
    """Whether a scheduler may look at the loss; of torch's own only one does."""
    name = scheduler.callable
    return not name.startswith("torch.optim") or name.endswith("ReduceLROnPlateau")
