"""A stage's first forward of a training, in which its code shows what it does besides computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcmp.pipelining import pytree, random_streams
from rpcmp.rpc.messages import MicrobatchMeta
from rpcmp.splitting.side_effects import functions_of
from rpcmp.worker.forward_state import ForwardState
from rpcmp.worker.injected_gradients import require_one_addition
from rpcmp.worker.inner_gradients import whole_derivatives
from rpcmp.worker.model import StageModel
from rpcmp.worker.objective import rows

SAMPLES = 4
"""That are looked at; two parts of two, which batch normalization needs."""


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

    def forward(self, inputs: list[Any], meta: MicrobatchMeta) -> Any:
        """Return the outputs of a micro-batch.

        Raises:
            ConfigError: the forward asks for a derivative that it would get a part of.
        """
        entered = [each.grad_fn for each in pytree.tensors(inputs)]
        with whole_derivatives(inputs, self._partial):
            outputs = self._model.forward(inputs, meta)
        self._inputs = inputs
        self._functions = functions_of(pytree.tensors(outputs), entered).functions
        return outputs

    def check(self, meta: MicrobatchMeta) -> bool:
        """Check the micro-batch's Functions, if it has called any; False: the next one is needed.

        Raises:
            ConfigError: they add gradients of their own, another sum for other micro-batches.
        """
        if not self._adds_up or meta.round.num_microbatches == 1:
            return True
        state = ForwardState(self._model.stateful())
        if self._model.compiles and self._before is None:
            self._functions = self._seen_eagerly(meta, state)
        if not self._functions:
            return True
        if meta.num_samples == 1 and self._before is None:
            self._before = self._inputs
            return False
        require_one_addition(
            self._functions,
            lambda inputs: self._model.forward(inputs, meta, eagerly=True),
            self._parts(meta.num_samples),
            (parameter for _, parameter in self._model.named_parameters()),
            state,
        )
        return True

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

    def _parts(self, samples: int) -> tuple[list[Any], list[Any]]:
        if self._before is not None:
            return self._before, self._inputs
        sizes = [each.shape[0] for each in pytree.tensors(self._inputs) if each.dim()]
        tokens = max((size for size in sizes if size % samples == 0), default=samples)
        count = min(samples, SAMPLES)
        half = count // 2
        first, second = (
            rows(self._inputs, start, end, samples, tokens)
            for start, end in ((0, half), (half, count))
        )
        return first, second
