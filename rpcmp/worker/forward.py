"""A stage's forwards: what they compute, and what they save for the backward.

Forwards run micro-batch by micro-batch. The answer to a bundle, which is one message, is one node
of the distributed graph. All of it runs on the stage's compute thread, but for an accelerator what
waits for copies: `Execution.receive`, and the sending of answers. See `copies`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rpcmp.config.topology import DRIVER, Port, Reference
from rpcmp.errors import ConfigError
from rpcmp.pipelining import pytree
from rpcmp.rpc.messages import Bundle, MicrobatchMeta, Mode, StageOutputs
from rpcmp.rpc.shared_memory import OwnMemory, SharedTensor, Sharing
from rpcmp.worker import boundary, copies
from rpcmp.worker.backward import Backwards, SavedBundle, SavedForward, stage_error
from rpcmp.worker.boundary import LocalTape
from rpcmp.worker.checks.first_forward import FirstForward
from rpcmp.worker.copies import Received, to_wire_dtype
from rpcmp.worker.model import LossScale, StageModel
from rpcmp.worker.recompute import Replay
from rpcmp.worker.weight_grad import Splitter

NOTHING_TRAINED = (
    "the loss does not depend on anything that is trained: what it reads was detached, computed "
    "under torch.no_grad() or by operations without a derivative, or all of the model is frozen"
)

UNSHARED: Mapping[int, Sharing] = {}


@dataclass
class Computed:
    """The forward of one micro-batch.

    Attributes:
        answers: for each port, StageOutputs that are not in any graph yet. Evaluated instead, from
            the sink in an evaluation.
        sharing: ports whose readers share memory with this process, and which.
        constants: tensors of the answers that depend on nothing that is trained.
        saved: for its backward; None outside of training.
    """

    received: list[StageOutputs]
    answers: list[Any]
    sharing: Mapping[int, Sharing] = field(default_factory=dict)
    constants: list[Tensor] = field(default_factory=list)
    saved: SavedForward | None = None


class Execution:
    """The forwards of one stage.

    Args:
        memory_for: returns the memory that this process shares with such a reader, if any.
        first: checks the first forward of a training.
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
        memory_for: Callable[[Sharing], OwnMemory | None] = lambda _: None,
        first: FirstForward | None = None,
    ) -> None:
        self._first, self._has_trained = first, False
        self._memory_for = memory_for
        self._stage = stage
        self._model = model
        self._references = references
        self._ports = ports
        self._backwards = backwards
        self._splitter = Splitter()
        self._wire_dtype = wire_dtype
        self._loss_scale = loss_scale
        self._state = model.forward_state() if recompute else None

    def receive(self, answers: list[StageOutputs]) -> Received:
        """Start to copy a micro-batch's inputs, which the targets follow if a sink needs them."""
        has_targets = self._model.is_sink and len(answers) > len(self._references)
        inputs = answers[: len(self._references)]
        return copies.receive(self._backwards.copies, inputs, answers[-1], has_targets)

    def forward(
        self,
        meta: MicrobatchMeta,
        received: Received,
        sharing: Mapping[int, Sharing] = UNSHARED,
    ) -> Computed:
        """Compute one micro-batch.

        Args:
            sharing: ports whose readers share memory with this process, and which.
        """
        try:
            if meta.round.is_training:
                with torch.enable_grad():
                    return self._train(meta, received, sharing)
            with torch.no_grad():
                return Computed(received.inputs, self._infer(meta, received, sharing), sharing)
        except BaseException as error:  # sys.exit() in a layer must not end a worker either
            sources = zip(self._references, received.inputs, strict=False)
            inputs = ", ".join(
                f"from {str(reference)!r}: {pytree.describe(outputs.value)}"
                for reference, outputs in sources
            )
            raise stage_error(self._stage, "forward", meta, error, inputs) from error

    def answer(
        self,
        bundle: Bundle,
        computed: list[Computed],
        send: Callable[[list[list[Any]]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Send for each port the answers of a bundle's micro-batches, once they are on the host.

        In training these are results of one node of the distributed graph. Runs no user code.

        Args:
            failed: called instead if the device has failed.
        """
        answers = [list(port) for port in zip(*(one.answers for one in computed), strict=True)]
        for port in computed[0].sharing if not self._model.is_sink else ():
            answers[port] = [outputs.lent() for outputs in answers[port]]
        forwards = [one.saved for one in computed if one.saved is not None]
        when_made = self._backwards.copies.when_made
        if not forwards:
            when_made(lambda: send(answers), failed)
            return
        _add_tokens(answers, forwards)
        saved = SavedBundle(bundle, forwards)
        tensors = [tensor for answer in answers for tensor in boundary.tensors_of(answer)]
        received = [tensor for one in computed for tensor in boundary.tensors_of(one.received)]
        constants = [tensor for one in computed for tensor in one.constants]
        run = functools.partial(self._backwards.run, saved)
        connected = iter(boundary.connect(run, tensors, received, constants))  # stage.py [8]
        answers = [[_replaced(outputs, connected) for outputs in answer] for answer in answers]

        def made() -> None:
            if self._model.is_sink and self._are_differentiated(tensors):
                scale = self._loss_scale or LossScale()
                # stage.py [9]
                self._backwards.start(saved, [scale.gradient(loss) for loss in tensors])
            send(answers)

        when_made(made, failed)

    def _are_differentiated(self, losses: list[Tensor]) -> bool:
        """Whether the sink's backward follows; without loss scaling, a loss may not be NaN or inf.

        With loss scaling the step is skipped unless all gradients are finite.
        """
        return self._loss_scale is not None or all(bool(torch.isfinite(loss)) for loss in losses)

    def _train(
        self, meta: MicrobatchMeta, received: Received, sharing: Mapping[int, Sharing]
    ) -> Computed:
        self._model.put_back()  # before a Replay copies what is to be put back for it
        weights = self._splitter.next_microbatch(self._backwards.splits)
        compute = functools.partial(self._compute, meta, received)
        inputs, own, arriving = received.inputs, self._backwards.copies, received.inputs_arriving
        tape: LocalTape | Replay
        if self._state is not None:
            watch = None if self._state.is_known else self._model.watch()
            tape = replay = Replay(
                compute, inputs, own, self._state, self._splitter, weights, arriving
            )
            outputs = replay.forward()
            if watch is not None and (changed := watch.changed()):
                raise ConfigError(
                    f"the forward changes the parameter {changed!r}, which recompute = true would "
                    "do twice: make it a buffer, or leave out `recompute` for this stage"
                )
        else:
            tape = local = LocalTape(inputs, own, arriving)  # stage.py [7]
            with weights.watch():
                outputs = compute(local.inputs)
            self._splitter.calibrate(local.leave(outputs))
        if self._first is not None and self._first.check(meta):
            self._first = None
        return self._computed(SavedForward(meta, tape, weights), outputs, inputs, sharing)

    def _compute(self, meta: MicrobatchMeta, received: Received, inputs: list[Any]) -> Any:
        outputs = (self._first or self._model).forward(inputs, meta)
        if not self._model.is_sink:
            return outputs
        targets, weight = received.targets_on_device(), received.targets.weight
        self._model.prove_objective(outputs, targets, meta, weight)
        loss = self._model.loss(outputs, targets, meta, weight)
        self._require_trained(loss, outputs, meta, weight is None or weight.own > 0)
        return loss

    def _require_trained(
        self, loss: Tensor, outputs: Any, meta: MicrobatchMeta, counts: bool
    ) -> None:
        """Check that some loss of the first step has a gradient; one of nothing may have none."""
        self._has_trained |= loss.requires_grad
        if self._has_trained or not counts:
            return
        is_last = meta.number == meta.round.num_microbatches - 1
        if is_last or not any(each.requires_grad for each in pytree.tensors(outputs)):
            raise ConfigError(NOTHING_TRAINED)

    def _computed(
        self,
        saved: SavedForward,
        outputs: Any,
        received: list[StageOutputs],
        sharing: Mapping[int, Sharing],
    ) -> Computed:
        produced = pytree.tensors(outputs)
        parts = [pytree.select(outputs, port.path) for port in self._ports]
        positions = {id(tensor): position for position, tensor in enumerate(produced)}
        constants: list[Tensor] = []
        answers = [
            self._outputs(index, part, constants, sharing) for index, part in enumerate(parts)
        ]
        saved.dtypes = [tensor.dtype for tensor in produced]
        saved.read = [[positions[id(tensor)] for tensor in pytree.tensors(part)] for part in parts]
        saved.shared = {p: shared for p in sharing if (shared := _shared_in(answers[p]))}
        saved.has_token = [outputs.token is not None for outputs in answers]
        return Computed(received, answers, sharing, constants, saved)

    def _outputs(
        self, index: int, part: Any, constants: list[Tensor], sharing: Mapping[int, Sharing]
    ) -> StageOutputs:
        """Copies for one reader: its answer is still being sent while the stage computes on."""
        outputs = self._copied(index, part, sharing)
        # The loss always has a gradient. What lies in shared memory gets one token per bundle.
        if self._ports[index].reader == DRIVER or _shared_in(outputs):
            return outputs
        pairs = list(zip(pytree.tensors(part), pytree.tensors(outputs.value), strict=True))
        fixed = [copy for tensor, copy in pairs if not tensor.requires_grad]
        constants += fixed
        is_all = len(fixed) == len(pairs)
        return outputs._replace(token=torch.empty(0)) if is_all else outputs

    def _copied(self, index: int, part: Any, sharing: Mapping[int, Sharing]) -> StageOutputs:
        _check_plain(part)
        dtype = None if self._ports[index].reader == DRIVER else self._wire_dtype
        memory = self._memory_for(sharing.get(index, Sharing.NONE))
        return to_wire_dtype(part, dtype, self._backwards.copies, memory)

    def _infer(
        self, meta: MicrobatchMeta, received: Received, sharing: Mapping[int, Sharing]
    ) -> list[Any]:
        tape = LocalTape(received.inputs, self._backwards.copies, received.inputs_arriving)
        outputs = self._model.forward(tape.inputs, meta)
        if meta.round.mode is Mode.EVALUATE and self._model.is_sink:
            targets, on_device = received.targets, received.targets_on_device()
            self._model.prove_objective(outputs, on_device, meta, targets.weight)
            evaluated = self._model.evaluate(outputs, on_device, meta, targets.weight)
            if self._model.returns_outputs:
                evaluated = evaluated._replace(
                    outputs=self._copied(0, outputs, UNSHARED).value,
                    targets=targets.value if meta.round.batch_id else None,
                )
            return [evaluated]
        return [
            self._copied(index, pytree.select(outputs, port.path), sharing)
            for index, port in enumerate(self._ports)
        ]


def _replaced(outputs: StageOutputs, tensors: Iterator[Tensor]) -> StageOutputs:
    return outputs._replace(
        value=pytree.map_tensors(lambda _: next(tensors), outputs.value),
        token=None if outputs.token is None else next(tensors),
    )


def _shared_in(outputs: StageOutputs) -> list[SharedTensor]:
    return [leaf for leaf in pytree.leaves(outputs.value) if isinstance(leaf, SharedTensor)]


def _add_tokens(answers: list[list[Any]], forwards: Sequence[SavedForward]) -> None:
    """Connect each reader that gets no tensor by torch RPC, by its bundle's first answer."""
    for port, answer in enumerate(answers):
        for index, forward in enumerate(forwards):
            if port in forward.shared:
                answer[index] = answer[index]._replace(token=torch.empty(0))
                forward.has_token[port] = True
                break


def _check_plain(outputs: Any) -> None:
    """Refuse what cannot be sent: objects of the user's classes may hold hidden tensors."""
    for leaf in pytree.leaves(outputs):
        if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
            raise TypeError(
                f"a stage returned {type(leaf).__name__}; return tensors, numbers, strings, None, "
                "and tuples, lists and dicts of these"
            )
