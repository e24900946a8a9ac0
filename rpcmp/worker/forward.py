"""How a stage computes forwards, and what it remembers of them.

Micro-batch by micro-batch; but the answer for a bundle of them, one message, is one node of the
distributed graph.

Everything here runs on the stage's compute thread. The backward that comes later is the business of
`rpcmp.worker.backward`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rpcmp.config.topology import DRIVER, Port, Reference
from rpcmp.pipelining import pytree
from rpcmp.rpc.messages import Bundle, MicrobatchMeta, Mode, StageOutputs
from rpcmp.worker import boundary
from rpcmp.worker.backward import Backwards, SavedBundle, SavedForward, Tape, failure
from rpcmp.worker.boundary import LocalTape
from rpcmp.worker.model import StageModel
from rpcmp.worker.precision import LossScale
from rpcmp.worker.recompute import Buffers, Replay
from rpcmp.worker.weight_grad import Splitter


@dataclass
class Computed:
    """The forward of one micro-batch.

    Attributes:
        received: what it was computed from.
        answers: for each port, Outputs that no tape knows of yet or, evaluating, Evaluated.
        constants: their tensors that depend on nothing that is trained.
        kept: for its backward; None outside of training.
    """

    received: list[StageOutputs]
    answers: list[Any]
    constants: list[Tensor] = field(default_factory=list)
    kept: SavedForward | None = None


class Execution:
    """The forwards of one stage.

    Args:
        stage: its name, for errors.
        model: its modules.
        references: what it reads.
        ports: who reads it.
        backwards: what runs its backwards.
        recompute: whether activations are computed again instead of kept.
        wire_dtype: what float32 tensors travel as between stages; None: as they are.
        loss_scale: of the gradients, where they are scaled.
    """

    def __init__(
        self,
        stage: str,
        model: StageModel,
        references: Sequence[Reference],
        ports: Sequence[Port],
        backwards: Backwards,
        recompute: bool,
        wire_dtype: torch.dtype | None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._stage = stage
        self._model = model
        self._references = references
        self._ports = ports
        self._backwards = backwards
        self._splitter = Splitter()
        self._wire_dtype = wire_dtype
        self._loss_scale = loss_scale
        self._buffers = Buffers(model.modules()) if recompute else None

    def forward(self, work: MicrobatchMeta, answers: list[StageOutputs]) -> Computed:
        """Compute one micro-batch; `answer` makes of a bundle's what its readers get.

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
                return Computed(received, self._infer(work, received, targets))
        except BaseException as error:  # sys.exit() in a layer is no way to end a worker either
            sources = zip(self._references, received, strict=False)
            got = ", ".join(
                f"from {str(reference)!r}: {pytree.describe(outputs.value)}"
                for reference, outputs in sources
            )
            raise failure(self._stage, "forward", work, error, got) from error

    def answer(self, bundle: Bundle, computed: list[Computed]) -> list[list[Any]]:
        """What each port's reader gets of a bundle: one of `Computed.answers` a micro-batch.

        In training these are the results of one node of the distributed graph. Runs none of the
        user's code.
        """
        answers = [
            list(of_port) for of_port in zip(*(one.answers for one in computed), strict=True)
        ]
        kept = [one.kept for one in computed if one.kept is not None]
        if not kept:
            return answers
        memory = SavedBundle(bundle, kept)
        tensors = [tensor for answer in answers for tensor in boundary.tensors_of(answer)]
        received = [tensor for one in computed for tensor in boundary.tensors_of(one.received)]
        constants = [tensor for one in computed for tensor in one.constants]
        run = functools.partial(self._backwards.run, memory)
        connected = iter(boundary.connect(run, tensors, received, constants))
        if self._model.is_sink and self._are_differentiated(tensors):
            scale = self._loss_scale or LossScale()
            self._backwards.start(memory, [scale.gradient(loss) for loss in tensors])
        return [[_replaced(outputs, connected) for outputs in answer] for answer in answers]

    def _are_differentiated(self, losses: list[Tensor]) -> bool:
        """Not a loss that is not finite: it ends the step at the conductor.

        Where gradients are scaled they decide: the step is skipped unless all of them are finite.
        """
        return self._loss_scale is not None or all(bool(torch.isfinite(loss)) for loss in losses)

    def _train(self, work: MicrobatchMeta, received: list[StageOutputs], targets: Any) -> Computed:
        weights = self._splitter.begin(self._backwards.splits)
        compute = functools.partial(self._compute, work, targets)
        device = self._model.device
        tape: Tape
        if self._buffers is not None:
            tape = replay = Replay(
                compute, received, device, self._buffers, self._splitter, weights
            )
            outputs = replay.forward()
        else:
            tape = local = LocalTape(received, device)
            with weights.watch():
                outputs = compute(local.inputs)
            self._splitter.calibrate(local.leave(outputs))
        return self._computed(SavedForward(work, tape, weights), outputs, received)

    def _compute(self, work: MicrobatchMeta, targets: Any, inputs: list[Any]) -> Any:
        outputs = self._model.forward(inputs, work)
        return self._model.loss(outputs, targets, work) if self._model.is_sink else outputs

    def _computed(self, kept: SavedForward, outputs: Any, received: list[StageOutputs]) -> Computed:
        produced = pytree.tensors(outputs)
        parts = [pytree.select(outputs, port.path) for port in self._ports]
        positions = {id(tensor): position for position, tensor in enumerate(produced)}
        constants: list[Tensor] = []
        answers = [
            self._outputs(port, part, constants)
            for port, part in zip(self._ports, parts, strict=True)
        ]
        kept.dtypes = [tensor.dtype for tensor in produced]
        kept.read = [[positions[id(tensor)] for tensor in pytree.tensors(part)] for part in parts]
        kept.has_token = [outputs.token is not None for outputs in answers]
        return Computed(received, answers, constants, kept)

    def _outputs(self, port: Port, part: Any, constants: list[Tensor]) -> StageOutputs:
        """Copies for one reader: its answer is being sent while the stage computes on."""
        outputs = self._copied(port, part)
        if port.reader == DRIVER:  # the loss, which is what is differentiated: it has a gradient
            return outputs
        pairs = list(zip(pytree.tensors(part), pytree.tensors(outputs.value), strict=True))
        fixed = [copy for tensor, copy in pairs if not tensor.requires_grad]
        constants += fixed
        is_all = len(fixed) == len(pairs)
        return outputs._replace(token=torch.empty(0)) if is_all else outputs

    def _copied(self, port: Port, part: Any) -> StageOutputs:
        _check_plain(part)
        dtype = None if port.reader == DRIVER else self._wire_dtype
        tensors = pytree.tensors(part)
        narrowed = tuple(i for i, t in enumerate(tensors) if dtype and t.dtype is torch.float32)
        copies = iter(
            _host_copy(tensor, dtype if index in narrowed else None)
            for index, tensor in enumerate(tensors)
        )
        return StageOutputs(pytree.map_tensors(lambda _: next(copies), part), narrowed=narrowed)

    def _infer(self, work: MicrobatchMeta, received: list[StageOutputs], targets: Any) -> list[Any]:
        tape = LocalTape(received, self._model.device)
        outputs = self._model.forward(tape.inputs, work)
        if work.mode is Mode.EVALUATE and self._model.is_sink:
            evaluated = self._model.evaluate(outputs, targets, work)
            if self._model.tells_outputs:
                told = self._copied(self._ports[0], outputs).value
                evaluated = evaluated._replace(
                    outputs=told, targets=targets if work.drawn else None
                )
            return [evaluated]
        return [self._copied(port, pytree.select(outputs, port.path)) for port in self._ports]


def _replaced(outputs: StageOutputs, tensors: Iterator[Tensor]) -> StageOutputs:
    """`outputs` with the next of `tensors` in the place of its own."""
    return outputs._replace(
        value=pytree.map_tensors(lambda _: next(tensors), outputs.value),
        token=None if outputs.token is None else next(tensors),
    )


def _check_plain(outputs: Any) -> None:
    """Refuse what cannot travel: an object of the user's class may hold tensors out of sight."""
    for leaf in pytree.leaves(outputs):
        if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
            raise TypeError(
                f"a stage returned {type(leaf).__name__}; return tensors, numbers, strings, None, "
                "and tuples, lists and dicts of these"
            )


def _host_copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A contiguous copy on the host that nobody else writes to."""
    host = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")
    return host.copy_(tensor.detach())
