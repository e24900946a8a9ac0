"""A stage's first forward of a training, in which its code shows what it does besides computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rpcmp.errors import some_of
from rpcmp.pipelining import pytree, random_streams
from rpcmp.rpc.messages import MicrobatchMeta
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.side_effects import (
    SideEffects,
    functions_of,
    has_backward_hooks,
    noted_hooks,
)
from rpcmp.worker.forward_state import ForwardState
from rpcmp.worker.injected_gradients import require_one_addition
from rpcmp.worker.inner_gradients import whole_derivatives
from rpcmp.worker.model import StageModel
from rpcmp.worker.objective import rows
from rpcmp.worker.parameter_hooks import require_linear
from rpcmp.worker.training_check import (
    differs_from_call_to_call,
    quiet,
    require_independent,
    require_linear_backward,
    require_unmoved,
)

SAMPLES = 4
"""That gradients of Functions are looked at for; two parts of two: batch normalization is on."""


class FirstForward:
    """Runs and checks the first forward; the first two, if each is of a single sample.

    Args:
        partial: see `rpcmp.worker.inner_gradients`.
        adds_up: whether the gradients of micro-batches are to add up to those of a mini-batch.
    """

    def __init__(self, model: StageModel, partial: Sequence[bool], adds_up: bool) -> None:
        self._model, self._partial, self._adds_up = model, partial, adds_up
        self._inputs: list[Any] = []
        self._before: list[Any] | None = None
        self._functions: list[str] = []
        self._hooks: list[str] = []

    def forward(self, inputs: list[Any], meta: MicrobatchMeta) -> Any:
        """Return the outputs of a micro-batch.

        Raises:
            ConfigError: the forward asks for a derivative that it would get a part of.
        """
        entered = [each.grad_fn for each in pytree.tensors(inputs)]
        seen = SideEffects()
        with whole_derivatives(inputs, self._partial), noted_hooks(seen):
            outputs = self._model.forward(inputs, meta)
        self._inputs, self._hooks = inputs, seen.hooks
        self._functions = functions_of(pytree.tensors(outputs), entered).functions
        return outputs

    def check(self, meta: MicrobatchMeta) -> bool:
        """Check the micro-batch's forward; False: the next one is needed, too.

        Raises:
            ConfigError: what it computes or keeps is another sum for other micro-batches.
        """
        variables = self._model.variables
        if variables is not None and variables.have_moved():
            variables.matters = self._depends_on_calls(meta)
        if not self._adds_up or meta.round.num_microbatches == 1:
            return True
        if meta.num_samples == 1 and self._before is None:
            self._before = self._inputs
            return False
        state = self._model.forward_state()
        parts, counts = self._parts(meta.num_samples, 2)
        other = meta._replace(number=meta.number + 1)

        def forward(inputs: list[Any], draws_others: bool = False) -> Any:
            own = pytree.map_tensors(Tensor.clone, inputs)  # it may write to them
            return self._model.forward(own, other if draws_others else meta, eagerly=True)

        require_linear(self._model.named_parameters())
        modules = [*self._model.modules()]
        with quiet(modules):
            require_unmoved(forward, parts[0], state, self._model.watch)
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
