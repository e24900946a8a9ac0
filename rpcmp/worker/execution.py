"""How a stage computes one micro-batch: forward, boundary, and the backward that comes later.

Everything here runs on the stage's compute thread, but for `_backward`, in which a thread of the
autograd engine waits until the schedule lets the compute thread run it.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Waiting
from typing import Any

import torch
from torch import Tensor

from rpcmp import tree
from rpcmp.errors import StageError, one_line
from rpcmp.graph import Port, Reference
from rpcmp.members import DRIVER
from rpcmp.schedule import Action
from rpcmp.work import Mode, Outputs, Work
from rpcmp.worker import boundary
from rpcmp.worker.boundary import Gradients, LocalTape
from rpcmp.worker.compute import ComputeThread, Task
from rpcmp.worker.model import StageModel


class Execution:
    """The computation of one stage.

    Args:
        stage: its name, for errors.
        model: its modules.
        references: what it reads.
        ports: who reads it.
        compute: its compute thread.
        on_failure: told of failures in a backward, which cannot be returned to anybody.
    """

    def __init__(
        self,
        stage: str,
        model: StageModel,
        references: Sequence[Reference],
        ports: Sequence[Port],
        compute: ComputeThread,
        on_failure: Callable[[Work, StageError], object],
    ) -> None:
        self._stage = stage
        self._model = model
        self._references = references
        self._ports = ports
        self._compute = compute
        self._on_failure = on_failure

    def forward(self, work: Work, answers: list[Outputs]) -> list[Any]:
        """What each port's reader gets: Outputs or, from the sink when evaluating, Evaluated.

        Args:
            work: the micro-batch.
            answers: what was received, in the order of the references; for a sink that needs
                them, the targets last.

        Raises:
            StageError: the user's code raised.
        """
        received = answers[: len(self._references)]
        targets = answers[-1].value
        try:
            if work.mode is Mode.TRAIN:
                with torch.enable_grad():
                    return self._train(work, received, targets)
            with torch.no_grad():
                return self._infer(work, received, targets)
        except BaseException as error:  # sys.exit() in a layer is no way to end a worker either
            raise self._failure(error, "forward", work, received) from error

    def _train(self, work: Work, received: list[Outputs], targets: Any) -> list[Outputs]:
        tape = LocalTape(received, self._model.device)
        outputs = self._model.forward(tape.inputs, work)
        if self._model.is_sink:
            outputs = self._model.loss(outputs, targets, work)
        produced = tape.leave(outputs)
        parts = [tree.select(outputs, port.path) for port in self._ports]
        positions = {id(tensor): position for position, tensor in enumerate(produced)}
        read = [[positions[id(tensor)] for tensor in tree.tensors(part)] for part in parts]
        constants: list[Tensor] = []
        fresh = [
            self._outputs(port, part, constants)
            for port, part in zip(self._ports, parts, strict=True)
        ]
        run_backward = functools.partial(self._backward, work, tape, read, len(produced))
        connected = iter(boundary.connect(run_backward, tree.tensors(fresh), received, constants))
        answers: list[Outputs] = tree.map_tensors(lambda _: next(connected), fresh)
        return answers

    def _outputs(self, port: Port, part: Any, constants: list[Tensor]) -> Outputs:
        """Copies for one reader: its answer is being sent while the stage computes on."""

        def copy(tensor: Tensor) -> Tensor:
            host = _host_copy(tensor)
            if not tensor.requires_grad and port.reader != DRIVER:
                constants.append(host)
            return host

        _check_plain(part)
        value = tree.map_tensors(copy, part)
        if port.reader == DRIVER:  # the driver differentiates the loss itself: it has a gradient
            return Outputs(value, None)
        return Outputs(value, torch.ones(len(tree.tensors(value))))

    def _infer(self, work: Work, received: list[Outputs], targets: Any) -> list[Any]:
        tape = LocalTape(received, self._model.device)
        outputs = self._model.forward(tape.inputs, work)
        if work.mode is Mode.EVALUATE and self._model.is_sink:
            return [self._model.evaluate(outputs, targets, work)]
        parts = [tree.select(outputs, port.path) for port in self._ports]
        _check_plain(parts)
        return [Outputs(tree.map_tensors(_host_copy, part), None) for part in parts]

    def _backward(
        self,
        work: Work,
        tape: LocalTape,
        read: list[list[int]],
        num_produced: int,
        gradients: Gradients,
    ) -> list[Tensor | None]:
        """The gradients of what was received; blocks until the schedule has let it run."""
        done: Waiting[list[Tensor | None]] = Waiting()

        def run() -> None:
            try:
                summed = self._sum_by_position(read, num_produced, gradients)
                done.set_result(tape.backward(summed))
            except BaseException as error:
                self._on_failure(work, self._failure(error, "backward", work, []))
                done.set_exception(RuntimeError(f"backward failed at stage {self._stage!r}"))

        def cancel() -> None:
            tape.free()
            done.set_exception(RuntimeError(f"stage {self._stage!r}: the step was aborted"))

        self._compute.submit(work.round, Action.BACKWARD, work.microbatch, Task(run, cancel))
        return done.result()

    def _sum_by_position(
        self, read: list[list[int]], num_produced: int, gradients: Gradients
    ) -> list[Tensor | None]:
        """The readers' gradients of each tensor that the stage produced, summed in one order."""
        contributions: list[list[Tensor | None]] = [[] for _ in range(num_produced)]
        left = iter(gradients)
        for port, positions in zip(self._ports, read, strict=True):
            grads = [next(left) for _ in positions]
            presence = None if port.reader == DRIVER else next(left)
            has_gradient = [True] * len(grads) if presence is None else presence.bool().tolist()
            for position, grad, has in zip(positions, grads, has_gradient, strict=True):
                contributions[position].append(grad if has else None)
        return [boundary.sum_gradients(found) for found in contributions]

    def _failure(
        self, error: BaseException, phase: str, work: Work, received: list[Outputs]
    ) -> StageError:
        sources = zip(self._references, received, strict=False)
        return StageError(
            stage=self._stage,
            phase=phase,
            cause=one_line(error),
            traceback="".join(traceback.format_exception(error)),
            step=work.step,
            microbatch=work.microbatch,
            received=", ".join(
                f"from {str(reference)!r}: {tree.describe(outputs.value)}"
                for reference, outputs in sources
            ),
        )


def _check_plain(outputs: Any) -> None:
    """Refuse what cannot travel: an object of the user's class may hold tensors out of sight."""
    for leaf in tree.leaves(outputs):
        if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
            raise TypeError(
                f"a stage returned {type(leaf).__name__}; return tensors, numbers, strings, None, "
                "and tuples, lists and dicts of these"
            )


def _host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the host that nobody else writes to."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return host.copy_(tensor.detach())
