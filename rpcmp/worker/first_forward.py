"""A stage's first forward of a training, in which its code shows what it does besides computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcmp.rpc.messages import MicrobatchMeta
from rpcmp.splitting.side_effects import noted_functions
from rpcmp.worker.forward_state import ForwardState
from rpcmp.worker.injected_gradients import require_one_addition
from rpcmp.worker.inner_gradients import whole_derivatives
from rpcmp.worker.model import StageModel


class FirstForward:
    """Runs and checks the first forward.

    Args:
        partial: see `rpcmp.worker.inner_gradients`.
        adds_up: whether the gradients of micro-batches are to add up to those of a mini-batch.
    """

    def __init__(self, model: StageModel, partial: Sequence[bool], adds_up: bool) -> None:
        self._model, self._partial, self._adds_up = model, partial, adds_up
        self._inputs: list[Any] = []
        self._functions: list[str] = []

    def forward(self, inputs: list[Any], meta: MicrobatchMeta) -> Any:
        """Return the outputs of a micro-batch.

        Raises:
            ConfigError: the forward asks for a derivative that it would get a part of.
        """
        with whole_derivatives(inputs, self._partial), noted_functions() as seen:
            outputs = self._model.forward(inputs, meta)
        self._inputs, self._functions = inputs, seen.functions
        return outputs

    def check(self, meta: MicrobatchMeta) -> None:
        """Check the micro-batch's Functions, if it has called any.

        Raises:
            ConfigError: they add gradients of their own, another sum for other micro-batches.
        """
        if self._functions and self._adds_up and meta.round.num_microbatches > 1:
            require_one_addition(
                self._functions,
                lambda inputs: self._model.forward(inputs, meta),
                self._inputs,
                meta.num_samples,
                (parameter for _, parameter in self._model.named_parameters()),
                ForwardState(self._model.stateful()),
            )
