"""The library: a pipelined model as an object of your own program.

`launch` never joins RPC in the calling process. A background thread supervises a driver process,
as `rpcmp drive` does, and passes every call to that process, with tensors in shared memory. So it
works in a notebook, any number of times, and after faults: a lost group is formed again from the
snapshots that all stages still have, and the calls that it has not seen are repeated.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, TypeVarTuple

from torch import Tensor

from rpcmp.config.schema import Config
from rpcmp.driver.evaluation import Evaluation
from rpcmp.driver.operations import Operations
from rpcmp.errors import (
    JobError,
    LossScaleError,
    RecoveryTimeoutError,
    RpcmpError,
    UnavailableError,
    WorkerDiedError,
    WorkerHungError,
    from_wire,
)
from rpcmp.job.autobalance import balanced
from rpcmp.job.server_pool import forks_for
from rpcmp.job.service import BackgroundLoop, Call, CallHistory, Service
from rpcmp.pipelining import parameter_names
from rpcmp.rpc.tensors import Handoff

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

RECOVERABLE = (WorkerDiedError, WorkerHungError, UnavailableError)
"""Errors after which the group is formed again."""


def launch(config: Config, connect: Sequence[str] | None = None) -> Pipeline:
    """Start a job and return its model, ready to train; use it as a context manager.

    Args:
        config: from `rpcmp.load_config`, or built in code. `epochs` and `steps` are not used, nor
            is `data` except to measure layers for `balance = "auto"`: the caller brings the
            mini-batches.
        connect: addresses of running stage servers, one per stage, or per replica of it;
            None uses the config's or, if it has none, starts servers on this machine.

    Raises:
        RpcmpError: why the job cannot start; nothing is left running.
    """
    return Pipeline(config, connect)


class Pipeline:
    """A model whose stages live in other processes; made by `launch`.

    Thread-safe; calls run one after the other. A lost process or host is replaced; the call takes
    longer, but its result is the same. After an error in the user's model the gradients are cleared
    and the pipeline stays usable. After an error in an optimizer some stages have stepped and some
    have not: launch again.

    Raises:
        JobError: every call, also of its optimizer, once the pipeline is closed.
        WorkerDiedError, UnavailableError: every such call, if a process or host is lost and
            recovery is off or has failed.

    Attributes:
        optimizer: the optimizers of all stages as one.
    """

    def __init__(self, config: Config, connect: Sequence[str] | None = None) -> None:
        self.optimizer = PipelineOptimizer(self)
        self._recovers = config.recovery.enabled
        self._history = CallHistory(is_kept=self._recovers)
        self._broken: RpcmpError | None = None
        self._caller = concurrent.futures.ThreadPoolExecutor(1, "rpcmp-calls")
        self._background = BackgroundLoop()
        ours, theirs = socket.socketpair()
        self._handoff = Handoff(ours)
        try:
            with theirs:
                self._service = self._background.run(_start(config, connect, self._history, theirs))
                self._other_names = self._service.config.other_names  # of a module as it was cut
        except BaseException:
            self._handoff.close()
            self._close_threads()
            raise
        self._closed = False

    def train_step(self, inputs: Any, targets: Any) -> float:
        """Do one optimizer step on a mini-batch; returns the mean loss.

        Clips gradients and steps the scheduler as the config says (`max_grad_norm`,
        `scheduler_interval = "step"`). With `loss_scaling` a step whose gradients are not all
        finite is skipped, at all stages, and the scheduler does not step either.

        Args:
            inputs, targets: trees of tensors whose first dimension counts the samples.

        Raises:
            StageError: the user's code raised at a stage.
            NonFiniteLossError: the loss is NaN or infinite, without `loss_scaling`.
            LossScaleError: with `loss_scaling`, so many steps were skipped that no gradient will
                ever be finite. Nothing has changed since the first of them, and nothing is trained
                any more unless `optimizer.load_state_dict` loads another scale.
            JobError: with `loss_scaling`, after clipping and before a step; see
                `forward_backward`.
            ConfigError: the inputs or targets are not such trees, have no samples, or weigh nothing
                by `loss_weight`.
        """
        return self._call(Operations.train_step, inputs, targets)

    def forward_backward(self, inputs: Any, targets: Any) -> float:
        """Accumulate the gradients of a mini-batch without a step; returns the mean loss.

        Takes what `train_step` takes, and raises what it raises.

        Raises:
            JobError: with `loss_scaling`, after clipping and before a step: clipped gradients are
                unscaled, and more gradients would be scaled. All are cleared.
            LossScaleError: see `train_step`.
        """
        return self._call(Operations.forward_backward, inputs, targets)

    def evaluate(self, inputs: Any, targets: Any) -> Evaluation:
        """Return loss and metrics of a mini-batch, with the model in evaluation mode.

        Args:
            inputs, targets: trees of tensors whose first dimension counts the samples.

        Raises:
            StageError: the user's code raised at a stage.
            JobError: a metric that keeps a state raised.
            ConfigError: the inputs or targets are not such trees, or have no samples.
        """
        return Evaluation(**self._call(Operations.evaluate, inputs, targets))

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs for `inputs`, in evaluation mode, without gradients.

        Args:
            inputs: a tree of tensors whose first dimension counts the samples.

        Returns:
            The last stage's tree, its tensors on the host; their first dimension counts the same
            samples, in the same order.

        Raises:
            StageError: the user's code raised at a stage.
            JobError: the outputs contain something that is neither a tensor nor a plain value.
            ConfigError: the inputs are not such a tree, or have no samples.
        """
        return self._call(Operations.predict, inputs)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the unsplit model's parameters and buffers, by name, on the host.

        The model's `load_state_dict(strict=True)` takes them, but for the frozen parameters of
        `rpcmp.from_init`, which are in the file of `init`. A `tied` parameter is one tensor
        under each of its names, as in the model's own `state_dict`; so are shapes and dtypes.
        """
        state = self._call(Operations.state_dict)
        return parameter_names.under_all_names(state, self._other_names)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load parameters and buffers of the unsplit model.

        Args:
            state: from `state_dict`, or the unsplit model's own.

        Raises:
            ConfigError: a name is missing or unknown, and nothing has been loaded; or a shape
                differs, and some layers may have been.
        """
        self._call(Operations.load_state_dict, dict(state))

    def parameters_sha256(self) -> str:
        """Return one hash of all parameters and buffers; see `rpcmp.parameters_sha256`.

        Returns:
            64 hexadecimal digits.

        Raises:
            MismatchError: the replicas of a stage have become different models.
        """
        return self._call(Operations.parameters_sha256)

    def close(self) -> None:
        """End the job and free its servers; does nothing the second time."""
        self._closed = True
        self._handoff.close()  # the driver process sees the end of the calls, and leaves the group
        try:
            if self._background.is_alive:
                self._background.run(self._service.end())
        finally:
            self._close_threads()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            warnings.warn("a Pipeline was not closed; use `with`", ResourceWarning, stacklevel=2)
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(
        self, operation: Callable[[Operations, *Arguments], Result], *arguments: *Arguments
    ) -> Result:
        """Call an operation on the group, which may have to be formed again first."""
        if self._closed:
            raise JobError("the pipeline is closed; launch again")
        # In a separate thread, so that a KeyboardInterrupt ends the wait, not the protocol.
        future = self._caller.submit(self._recovering_call, operation.__name__, arguments)
        try:
            result: Result = future.result()
            return result
        except concurrent.futures.CancelledError as error:
            raise JobError("the pipeline was closed meanwhile") from error

    def _recovering_call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return a call's result, however often the group has to be formed again for it."""
        if self._broken is not None:
            raise self._broken
        call = self._history.new_call(name, arguments)
        while True:
            try:
                self._service.require_serving()
                return self._exchange(call)
            except RECOVERABLE as error:
                if not self._recovers or self._closed:
                    raise
                self._recover(error)

    def _recover(self, error: RpcmpError) -> None:
        """Form the next group and repeat the calls that it has not seen; raises if that fails."""
        while not self._closed:
            try:
                return self._form_again(error)
            except RpcmpError as another:
                is_lost = isinstance(another, RECOVERABLE)
                if not is_lost or isinstance(another, RecoveryTimeoutError):
                    self._broken = another
                    raise
                error = another
        raise JobError("the pipeline was closed meanwhile")

    def _form_again(self, error: RpcmpError) -> None:
        self._handoff.close()
        ours, theirs = socket.socketpair()
        self._handoff = Handoff(ours)
        with theirs:
            start = self._background.run(self._service.recover(error, theirs))
        for call in self._history.since(start):
            with contextlib.suppress(LossScaleError):  # it was raised when the call was new
                self._exchange(call)

    def _exchange(self, call: Call) -> Any:
        """Let the driver process answer one call; raises the error that it answers with."""
        try:
            self._handoff.send((call.version, call.name, *call.arguments))
            answer = self._handoff.receive()
        except (OSError, EOFError) as error:
            lost = WorkerDiedError("the driver process is gone; launch again")
            raise self._explained(lost) from error
        if "error" in answer:
            raised = self._explained(from_wire(answer["error"]))
            if "state" in answer:
                self._history.record_done(call, answer["state"], answer["kept"])
            elif not isinstance(raised, RECOVERABLE):
                self._history.record_failed(call)
            raise raised
        self._history.record_done(call, answer["state"], answer["kept"])
        return answer["result"]

    def _explained(self, error: RpcmpError) -> RpcmpError:
        """Return the reason of a lost connection, if a supervisor knows it."""
        if not isinstance(error, WorkerDiedError) or not self._background.is_alive:
            return error
        return self._background.run(self._service.failure_reason()) or error

    def _close_threads(self) -> None:
        self._background.close()  # which cancels a recovery that the caller may be waiting for
        self._caller.shutdown(cancel_futures=True)


class PipelineOptimizer:
    """The optimizers of all stages as one, with the methods of `torch.optim`.

    With `loss_scaling`, `step` and `clip_grad_norm_` unscale the gradients first, as
    `torch.amp.GradScaler` does.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def step(self) -> bool:
        """Update the parameters of all stages and clear their gradients.

        Returns:
            Whether they were updated: with `loss_scaling` a step is skipped, at all stages, if any
            of them has a gradient that is not finite.

        Raises:
            StageError: an optimizer raised, or replicas could not sum their gradients.
        """
        return self._pipeline._call(Operations.optimizer_step)

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; 1.0 without `loss_scaling`."""
        return float(self._pipeline._call(Operations.scaler_state)["scale"])

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; 0 without `loss_scaling`."""
        return int(self._pipeline._call(Operations.scaler_state)["skipped"])

    def zero_grad(self) -> None:
        """Clear the gradients of all stages."""
        self._pipeline._call(Operations.zero_grad)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale the gradients so that their norm over all stages is at most `max_norm`.

        Args:
            max_norm: the largest norm.
            norm_type: such as 2.0, or infinity for the largest absolute value.

        Returns:
            The norm before scaling.

        Raises:
            StageError: replicas could not sum their gradients.
        """
        return self._pipeline._call(Operations.clip_grad_norm_, max_norm, norm_type)

    def step_scheduler(self, loss: float = 0.0) -> None:
        """Step the learning-rate schedulers; `loss` is for those that watch one.

        Raises:
            StageError: a scheduler raised.
        """
        self._pipeline._call(Operations.step_scheduler, loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all stages' optimizers and schedulers, for `load_state_dict`.

        Returns:
            "state", by the parameter's name in the unsplit model; "param_groups" and "scheduler",
            by the stage's name; "step", optimizer steps done; with `loss_scaling` "scaler".
        """
        return self._pipeline._call(Operations.optimizer_state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Args:
            state: all of it, including "step", whose number seeds the next step's dropout.

        Raises:
            ConfigError: it lacks a stage of this job, or belongs to another optimizer.
            StageError: a stage's optimizer or scheduler refuses it.
        """
        self._pipeline._call(Operations.load_optimizer_state_dict, state)


async def _start(
    config: Config,
    connect: Sequence[str] | None,
    history: CallHistory,
    connection: socket.socket,
) -> Service:
    async with forks_for(config, connect) as forks:
        config, _ = await balanced(config, connect, forks)
    for text in config.model_copy(
        update={"data": None}
    ).warnings:  # the caller's mini-batches may be larger
        warnings.warn(text, stacklevel=2)
    service = Service(config.model_copy(update={"checkpoint": None}), connect, history)
    await service.start(connection)
    return service
