"""A job whose stages and driver are in this process: real but for torch RPC and the processes.

    driver's Group, Training ──LocalTransport──> Stage, Stage, ...    each with its compute thread
                                    └── one thread pool; plain autograd in place of the distributed

Every stage has its threads, so schedules, replicas, shared parameters, recomputation, clipping,
loss scaling and aborts run for real, in a fraction of a second. A message arrives as a copy, by the
unpickler of the real ones. What only processes show is left to tests/cluster: how distributed
autograd records what is sent, its zeros in the place of None, strides on the wire.

Generators are the process's, and are seeded before every layer, step and mini-batch. So what draws
from them does so one at a time.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.futures import Future

from rpcmp import data, plan, ties, unpickling
from rpcmp.config import Config
from rpcmp.driver.group import Group
from rpcmp.driver.planning import plan_job
from rpcmp.driver.training import Training
from rpcmp.members import DRIVER
from rpcmp.process.channel import Message
from rpcmp.reference.training import UnsplitModel
from rpcmp.source import Source
from rpcmp.transport import attempt
from rpcmp.verify import Run, first_difference
from rpcmp.worker.execution import Execution
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.stage import Stage
from tests.support.places import ZOO

sys.path.append(str(ZOO))  # its models are imported here, and not from a job's folder

NUM_THREADS = 4
"""Threads of the pool; as in a worker, no handler blocks one."""

_computing = threading.RLock()


class LocalTransport:
    """The members of a group that are all in this process; see rpcmp.transport.Transport.

    Args:
        services: what each member serves, by its name; may be filled in later.
    """

    def __init__(self, services: dict[str, Any]) -> None:
        self._services = services
        self._pool = ThreadPoolExecutor(NUM_THREADS, "local-rpc")
        self._contexts = itertools.count(1)

    def call(self, member: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._ask(lambda: self._services[member], method, args)

    def remote_service(self, member: str) -> Any:
        return self._services[member]

    def remote_part(self, owner_rref: Any, getter: Callable[[Any], Any]) -> Any:
        return getter(owner_rref)

    def call_rref(self, target_rref: Any, method: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._ask(lambda: target_rref, method, args)

    @contextlib.contextmanager
    def autograd_context(self) -> Iterator[int]:
        yield next(self._contexts)

    def backward(self, context_id: int, roots: Sequence[Tensor]) -> None:
        try:
            torch.autograd.backward(list(roots))
        except Exception as error:
            raise RuntimeError(f"Error on a node: {error}") from error

    def live_state(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Let its threads end."""
        self._pool.shutdown()

    def _ask(
        self, target: Callable[[], Any], method: Callable[..., Any], args: tuple[Any, ...]
    ) -> Future[Any]:
        answer: Future[Any] = Future()
        arrived = copied(args)

        def answered(done: Future[Any]) -> None:
            answer.set_result(attempt(lambda: copied(done.value())))

        def serve() -> None:
            value = attempt(lambda: method(target(), *arrived))
            if isinstance(value, Future):
                value.add_done_callback(answered)
            else:
                answer.set_result(attempt(lambda: copied(value)))

        self._pool.submit(serve)
        return answer


class _Journey(torch.autograd.Function):
    """A tensor's way to another member; its gradient comes back the same way."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def copied(message: Any) -> Any:
    """What arrives of a message: pickled and unpickled, with copies of its tensors."""
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, Tensor):
                return None
            tensors.append(value)
            return len(tensors) - 1

    class Unpickler(unpickling.Unpickler):
        def persistent_load(self, number: Any) -> Tensor:
            sent = tensors[number]
            with torch.enable_grad():
                apply: Callable[[Tensor], Tensor] = _Journey.apply
                return apply(sent) if sent.requires_grad else sent.detach().clone()

    stream = io.BytesIO()
    Pickler(stream).dump(message)
    return Unpickler(io.BytesIO(stream.getvalue())).load()


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _computing:
            return function(*args, **kwargs)

    return call


@dataclass
class LocalGroup:
    """All members of a job's group.

    Attributes:
        config: the job.
        stages: by the workers' names.
        group: the driver's side.
        events: what the driver has told.
    """

    config: Config
    stages: dict[str, Stage]
    group: Group
    training: Training
    events: list[Message] = field(default_factory=list)

    def train(self, evaluate: bool = False) -> Run:
        """Train to the end."""
        self.training.run(evaluate)
        losses = [event["loss"] for event in self.events if event["event"] == "step"]
        scaler = self.training.progress.scaler
        skipped = 0 if scaler is None else scaler.skipped
        state = ties.under_all_names(self.group.state_dict(), self.config.tied_to)
        return Run(losses, state, skipped=skipped)


@contextlib.contextmanager
def local_group(config: Config) -> Iterator[LocalGroup]:
    """A job's group, joined and ready to train."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (Execution, "_compute"),
            (Execution, "_infer"),
            (StageOptimizer, "_step"),
            (data.Samples, "__getitem__"),
            (data.OwnSampler, "indices"),
        ):
            patch.setattr(owner, name, _one_at_a_time(getattr(owner, name)))
        unpickling.allow(config.modules)
        planned = plan_job(config)
        services: dict[str, Any] = {DRIVER: Source()}
        peers = LocalTransport(services)
        stages = {
            part.member.name: Stage(part, peers, rehearses=False) for part in planned.assignments
        }
        services |= stages
        group = Group(config, services[DRIVER], peers)
        events: list[Message] = []
        assert planned.datasets is not None
        training = Training(
            config,
            planned.datasets,
            group,
            events.append,
            threading.Event(),
            metrics=planned.metrics,
        )
        try:
            yield LocalGroup(config, stages, group, training, events)
        finally:
            group.close()
            peers.close()


def unsplit(config: Config) -> Run:
    """The same job in one process, by code that shares nothing with the stages'."""
    section = config.require_data("training the unsplit model")
    batches = data.load(section.train, "data.train", section, config.seed, training=True)
    model = UnsplitModel(config, {part.stage_name: part.layers for part in plan.assign(config)})
    assert config.steps is not None
    losses = list(model.train(batches, config.steps))
    return Run(losses, {name: value.detach() for name, value in model.state_dict().items()})


def require_same_bits(config: Config) -> Run:
    """Train in a group and in one process, and compare; returns the group's run."""
    with local_group(config) as local:
        found = local.train()
    difference = first_difference(found, unsplit(config))
    assert difference is None, difference
    return found
