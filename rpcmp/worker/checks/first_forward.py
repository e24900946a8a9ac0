"""A stage's first forward of a training, in which its code shows what it does besides computing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from rpcmp.errors import ConfigError, some_of
from rpcmp.pipelining import pytree, random_streams
from rpcmp.rpc.messages import MicrobatchMeta
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.side_effects import (
    SideEffects,
    functions_of,
    has_backward_hooks,
    noted_hooks,
    parameters_of,
)
from rpcmp.worker.checks.injected_gradients import require_one_addition
from rpcmp.worker.checks.inner_gradients import whole_derivatives
from rpcmp.worker.checks.objective import rows
from rpcmp.worker.checks.parameter_hooks import require_linear
from rpcmp.worker.checks.second_forward import (
    DataDependentInit,
    differs_from_call_to_call,
    require_repeatable,
    require_unmoved,
)
from rpcmp.worker.checks.training_check import quiet, require_independent, require_linear_backward
from rpcmp.worker.model import StageModel
from rpcmp.worker.state.forward_state import ForwardState, ParameterWatch

SAMPLES = 4
"""That gradients of Functions are looked at for; two parts of two: batch normalization is on."""


class FirstForward:
    """Runs and checks the first forward; the first two, if each is of a single sample.

    Args:
        partial: see `rpcmp.worker.checks.inner_gradients`.
        adds_up: whether the gradients of micro-batches are to add up to those of a mini-batch.
    """

    def __init__(self, model: StageModel, partial: Sequence[bool], adds_up: bool) -> None:
        self._model, self._partial, self._adds_up = model, partial, adds_up
        self._inputs: list[Any] = []
        self._before: list[Any] | None = None
        self._functions: list[str] = []
        self._hooks: list[str] = []
        self._parameters: ParameterWatch | None = None
        self._init: DataDependentInit | None = None

    def forward(self, inputs: list[Any], meta: MicrobatchMeta) -> Any:
        """Return the outputs of a micro-batch.

        Raises:
            ConfigError: the forward asks for a derivative that it would get a part of.
        """
        if self._parameters is None:
            self._model.set_mode(training=True)  # which may merge weights
            self._parameters = self._model.watch()
            if self._has_parts(meta):
                self._init = DataDependentInit(self._model.forward_state(), self._parameters)
        entered = [each.grad_fn for each in pytree.tensors(inputs)]
        seen = SideEffects()
        with whole_derivatives(inputs, self._partial), noted_hooks(seen):
            outputs = self._model.forward(inputs, meta)
        self._inputs, self._hooks = inputs, seen.hooks
        self._functions = functions_of(pytree.tensors(outputs), entered).functions
        self._require_own_parameters(parameters_of(pytree.tensors(outputs), entered))
        return outputs

    def _require_own_parameters(self, read: Sequence[nn.Parameter]) -> None:
        own = {id(each) for _, each in self._model.named_parameters()}
        names = {id(each): name for name, each in self._model.hidden.items()}
        if foreign := [each for each in read if id(each) not in own]:
            shown = [names.get(id(each), f"one of the shape {[*each.shape]}") for each in foreign]
            raise ConfigError(
                f"the outputs depend on parameters that no layer of this stage has, so no "
                f"optimizer trains them here ({some_of(shown)}): let a layer have them as "
                "attributes, and `tied` name them if several layers do, or freeze them"
            )

    def check(self, meta: MicrobatchMeta) -> bool:
        """Check the micro-batch's forward; False: the next one is needed, too.

        Raises:
            ConfigError: what it computes or keeps is another sum for other micro-batches.
        """
        with _flags_kept([each for _, each in self._model.named_parameters()]):
            return self._check(meta)

    def _check(self, meta: MicrobatchMeta) -> bool:
        variables = self._model.variables
        if variables is not None and variables.have_moved():
            variables.matters = self._depends_on_calls(meta)
        has_parts = self._has_parts(meta)
        if has_parts and meta.num_samples == 1 and self._before is None:
            self._before = self._inputs
            return False
        state = self._model.forward_state()
        parts, counts = self._parts(meta.num_samples, 2)
        other = meta._replace(number=meta.number + 1)

        def forward(inputs: list[Any], draws_others: bool = False) -> Any:
            own = pytree.map_tensors(Tensor.clone, inputs)  # it may write to them
            return self._model.forward(own, other if draws_others else meta, eagerly=True)

        modules = [*self._model.modules()]
        # A graph has nothing that it could keep; and nobody puts parameters back.
        if not self._model.is_cut and not (self._parameters and self._parameters.changed()):
            with quiet(modules):
                require_repeatable(forward, (parts[1], self._inputs), state)
        if not has_parts:
            return True
        require_linear(self._model.named_parameters())
        with quiet(modules):
            require_unmoved(forward, parts[0], state, self._model.watch)
            if self._init is not None:
                self._init.require_none(forward, parts[0])
            # In a cut batch normalization cannot be told apart, to be left out.
            if not any(isinstance(each, SplitLayer) and each.needs_two_samples for each in modules):
                require_independent(forward, parts, counts, state)
        functions = self._seen_eagerly(meta, state) if self._model.compiles else self._functions
        trained = [each for _, each in self._model.named_parameters() if each.requires_grad]
        if functions:
            some, _ = self._parts(meta.num_samples, SAMPLES)
            require_one_addition(functions, forward, some, trained, state)
        if changing := [*functions, *self._hooks, *_with_backward_hooks(modules)]:
            with quiet(modules):
                what = f"{some_of(changing)} changes gradients"
                require_linear_backward(forward, parts, counts, trained, state, what)
        return True

    def _has_parts(self, meta: MicrobatchMeta) -> bool:
        return self._adds_up and meta.round.num_microbatches > 1

    def _depends_on_calls(self, meta: MicrobatchMeta) -> bool:
        def forward(inputs: list[Any], _: bool) -> Any:
            own = pytree.map_tensors(Tensor.clone, inputs)
            return self._model.forward(own, meta, eagerly=True)

        with quiet([*self._model.modules()]):
            return differs_from_call_to_call(forward, self._inputs, self._model.forward_state())

    def _seen_eagerly(self, meta: MicrobatchMeta, state: ForwardState) -> list[str]:
        before = state.copy()
        try:
            with random_streams.kept():
                outputs = self._model.forward(self._inputs, meta, eagerly=True)
        finally:
            state.put_back(before)
        # Compiled code has none: they were traced, and are a part of one that is torch's.
        entered = [each.grad_fn for each in pytree.tensors(self._inputs)]
        return functions_of(pytree.tensors(outputs), entered).functions

    def _parts(
        self, samples: int, most: int
    ) -> tuple[tuple[list[Any], list[Any]], tuple[int, int]]:
        """Return inputs of some samples and of some more, and how many these are."""
        if self._before is not None:
            return (self._before, self._inputs), (1, 1)
        sizes = [each.shape[0] for each in pytree.tensors(self._inputs) if each.dim()]
        tokens = max((size for size in sizes if size % samples == 0), default=samples)
        count = min(samples, most)
        half = count // 2
        first, second = (
            rows(self._inputs, start, end, samples, tokens)
            for start, end in ((0, half), (half, count))
        )
        return (first, second), (half, count - half)


def _with_backward_hooks(modules: Sequence[nn.Module]) -> list[str]:
    return [f"a hook of {type(each).__name__}" for each in modules if has_backward_hooks(each)]


@contextlib.contextmanager
def _flags_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Undo what forwards in this block freeze, as one may that counts its calls."""
    before = [each.requires_grad for each in parameters]
    try:
        yield
    finally:
        for each, flag in zip(parameters, before, strict=True):
            if each.requires_grad != flag:
                each.requires_grad_(flag)
