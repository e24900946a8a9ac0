"""Groups whose stages and driver are in this process: real except for torch RPC and processes.

    driver's Group, Training ──LocalTransport──> Stage, Stage, ...    each with its compute thread
                                    └── one thread pool; plain autograd instead of distributed

Every stage is built as in a worker and has its threads. So schedules, replicas, shared parameters,
recomputation, clipping, loss scaling, snapshots and aborts run for real, in a fraction of a second.
tests/cluster covers what needs processes: how distributed autograd records sent tensors, its zeros
instead of None, strides on the wire, and lost members.

The process has one set of random generators, which are seeded before every layer, step and
mini-batch. So code that draws from them runs one at a time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch.nn.functional as F  # noqa: N812

from rpcmp.checkpoint.slots import Slots
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.data import loader_process
from rpcmp.data.batch_server import BatchServer
from rpcmp.data.batches import Samples
from rpcmp.data.loader_pool import LoaderPool
from rpcmp.data.loading import training_batches
from rpcmp.data.sample_order import OwnSampler
from rpcmp.driver.datasets import Datasets
from rpcmp.driver.evaluation import Metrics
from rpcmp.driver.process import PlannedJob, plan_job
from rpcmp.driver.progress import TrainingProgress
from rpcmp.driver.stage_group import StageGroup
from rpcmp.driver.training import Training
from rpcmp.errors import JobError, from_wire
from rpcmp.observability.events import Json
from rpcmp.pipelining import assignment, devices, parameter_names
from rpcmp.pipelining.assignment import Assignment
from rpcmp.process.activity import Activity
from rpcmp.process.channel import ChildContext, Message
from rpcmp.rpc import unpickler
from rpcmp.rpc.messages import DatasetInfo
from rpcmp.tools.reference_model import UnsplitModel
from rpcmp.tools.verification import ComparedRun, first_difference
from rpcmp.worker import process, weight_grad
from rpcmp.worker.checks.first_forward import FirstForward
from rpcmp.worker.forward import Execution
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.stage import Stage
from tests.support.faults import Committed
from tests.support.instances import record_instances
from tests.support.localtransport import LocalTransport
from tests.support.places import ZOO

sys.path.append(str(ZOO))  # its models are imported from here, not from a job's folder

_computing = threading.RLock()


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _computing:
            return function(*args, **kwargs)

    return call


def _meanwhile_others(function: Callable[[int], None]) -> Callable[[int], None]:
    """Wrap `function`, which waits for other stages, so that it releases its turn meanwhile."""

    def call(step: int) -> None:
        _computing.release()
        try:
            function(step)
        finally:
            _computing.acquire()

    return call


class SavedGroup(NamedTuple):
    """State that a group can resume from.

    Attributes:
        progress: the driver's progress.
        files: the files with the snapshots of all stages.
    """

    progress: TrainingProgress
    files: list[str]


class _Supervisor:
    """A stand-in for a worker's channel, which ignores all messages."""

    def send(self, message: Message) -> None:
        """Ignore the message."""


class LocalLoaders(LoaderPool):
    """The loaders of a stage's samples, in a thread instead of processes."""

    def __init__(self, config: Config, stage: str) -> None:
        self._config, self._stage = config, stage
        self._references = config.graph().parts(stage)
        self._all = [cast(Any, SimpleNamespace(thread=ThreadPoolExecutor(1, "local-loader")))]
        self._loading = loader_process.Loading(config, stage)

    def holding(self) -> DatasetInfo:
        built = _answered(self._loading.build())
        return DatasetInfo(self._stage, built["sizes"], built["streams"])

    def close(self) -> None:
        self._all[0].thread.shutdown()

    def _ask(self, loader: Any, request: list[Any]) -> Any:
        asked = self._loading.order if len(request) == 1 else self._loading.load
        return _answered(asked(*request))


def _answered(answer: Message) -> Message:
    if "error" in answer:
        raise from_wire(answer["error"])
    return answer


class LocalWorker:
    """One worker's stage, with memory for its snapshots.

    Args:
        part: the stage and its job.
        files: the snapshots that it resumes from.
    """

    def __init__(self, part: Assignment, files: Sequence[str]) -> None:
        self.part = part
        self.slots = Slots.create()
        loads = part.loads_data and part.config.graph().parts(part.stage_name)
        self._loaders = LocalLoaders(part.config, part.stage_name) if loads else None
        start = {"rehearses": False, "is_mirrored": False, "saves": False, "cut": 0, "compiled": ""}
        bond = ChildContext(
            *(cast(Any, _Supervisor()), Activity(), cast(Any, None), cast(Any, None)),
            list(self.slots.fds),
        )
        worker = process.WorkerProcess(bond, start)
        self.stage = worker._build(part, self._loaders)
        if files:
            worker._restore(self.stage, 0, list(files))
        optimizer = self.stage.optimizer
        optimizer._after_step = _meanwhile_others(optimizer._after_step)

    def end(self) -> None:
        """Stop its threads and free its memory."""
        self.stage._compute.close()
        if self._loaders is not None:
            self._loaders.close()
        self.slots.close()


@dataclass
class LocalGroup:
    """All members of a job's group.

    Attributes:
        config: the job.
        workers: the workers, each with its stage.
        group: the driver's side.
        metrics: the metrics that the driver computes.
        saved: the state that it resumes from.
        events: events that the driver reported.
    """

    config: Config
    planned: PlannedJob
    workers: list[LocalWorker]
    group: StageGroup
    saved: SavedGroup | None = None
    events: list[Json] = field(default_factory=list)

    @cached_property
    def training(self) -> Training:
        """The training that the config describes."""
        datasets = self.planned.datasets
        if self.planned.loads_at_stages:
            datasets = Datasets.at_stages(self.config, self.group)
        if datasets is None:
            raise JobError("this group has no data to train with")
        progress = None if self.saved is None else self.saved.progress
        if progress is not None and progress.scaler is not None:
            self.group.optimizer.load_scaler(progress.scaler)
        return Training(
            self.config,
            datasets,
            self.group,
            lambda event: self.events.append(event.to_json()),
            lambda progress: None,
            threading.Event(),
            progress,
            metrics=self.metrics,
        )

    @property
    def metrics(self) -> Metrics:
        return self.planned.metrics

    def of(self, kind: str) -> list[Json]:
        """Return the events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def train(self, evaluate: bool = False) -> ComparedRun:
        """Train to the end."""
        self.training.run(evaluate)
        losses = [event["loss"] for event in self.of("step")]
        scaler = self.training.progress.scaler
        skipped = 0 if scaler is None else scaler.skipped
        merged = self.group.workers.merge(Stage.state_dict)
        state = parameter_names.under_all_names(merged, self.config.other_names)
        return ComparedRun(losses, state, skipped=skipped)

    def committed(self) -> Committed:
        """Return the same results as `tests.support.faults.committed`."""
        steps = [(event["step"], event["loss"].hex()) for event in self.of("step")]
        return steps, self.group.parameters_sha256()

    def save(self, folder: Path) -> SavedGroup:
        """Copy the stages' snapshots of the last step to files, for another group.

        The driver's part is copied as JSON, as in a checkpoint's manifest.
        """
        folder.mkdir(exist_ok=True)
        step, files = self.training.progress.step, []
        for worker in self.workers:
            snapshot = worker.slots.get(step)
            assert snapshot is not None, f"{worker.part.member.label} keeps nothing of step {step}"
            files.append(str(folder / f"{worker.part.member.name}.safetensors"))
            shutil.copyfile(worker.slots.path(snapshot.slot), files[-1])
        message = json.loads(json.dumps(asdict(self.training.progress)))
        return SavedGroup(TrainingProgress.from_message(message), files)


def _end(executors: Sequence[ThreadPoolExecutor]) -> None:
    """Shut down the members' thread pools, which in a worker end with the process."""
    for each in executors:
        each.shutdown(wait=False)


@contextlib.contextmanager
def local_group(
    config: Config, saved: SavedGroup | None = None, load_data: bool = True
) -> Iterator[LocalGroup]:
    """Build a job's group, joined and ready to train.

    Args:
        saved: the state that the group resumes from.
        load_data: whether the group trains on the config's data.
    """
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.callback(_end, record_instances(patch, ThreadPoolExecutor))
        for owner, name in (
            (Execution, "_compute"),
            (Execution, "_infer"),
            (FirstForward, "check"),
            (StageOptimizer, "_step"),
            (Samples, "__getitem__"),
            (OwnSampler, "indices"),
        ):
            patch.setattr(owner, name, _one_at_a_time(getattr(owner, name)))
        unpickler.allow(config.modules)
        planned = plan_job(config, load_data=load_data)
        if any(part.may_split for part in planned.assignments):
            for name in ("linear", *weight_grad.CONVOLUTIONS):
                patch.setattr(F, name, getattr(F, name))  # undone after the test
            weight_grad.install()
        services: dict[str, Any] = {DRIVER: BatchServer()}
        peers = LocalTransport(services)
        stack.callback(peers.close)
        patch.setattr(process, "Transport", lambda: peers)
        workers = []
        wanted = [part.stage.device for part in planned.assignments]
        for own, assigned in enumerate(planned.assignments):
            part = assigned.model_copy(update={"device": devices.settle(wanted, own)})
            workers.append(LocalWorker(part, [] if saved is None else saved.files))
            stack.callback(workers[-1].end)
            services[part.member.name] = workers[-1].stage
        group = StageGroup(config, services[DRIVER], peers)
        stack.callback(group.close)
        # No thread may wait inside an unfinished step: threads are joined at the exit.
        stack.callback(group._rounds.abort, JobError("the group has ended"), 1)
        yield LocalGroup(config, planned, workers, group, saved)


def unsplit(config: Config) -> ComparedRun:
    """Train the same job in one process, with code that shares nothing with the stages."""
    batches = training_batches(config)
    model = UnsplitModel(
        config, {part.stage_name: part.layers for part in assignment.assign(config)}
    )
    assert config.steps is not None
    losses = list(model.train(batches, config.steps))
    return ComparedRun(losses, {name: value.detach() for name, value in model.state_dict().items()})


def require_same_bits(config: Config) -> ComparedRun:
    """Train in a group and in one process, and compare the bits; return the group's run."""
    with local_group(config.without_recovery()) as local:
        found = local.train()
    difference = first_difference(found, unsplit(config))
    assert difference is None, difference
    return found
