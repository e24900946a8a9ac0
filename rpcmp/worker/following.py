"""What the replicas of a stage take over from replica 0.

    to begin with            parameters and buffers
    after each round         buffers
    after each step          parameters, where hosts differ

Batch normalization's running statistics are changed by the micro-batches that a replica has seen:
replica 0's count, as under DistributedDataParallel. They are final with the round's last backward,
so they travel while the gradients are summed. A buffer that is still what it was in the beginning,
a mask or a table of positions, does not travel. Parameters are equal anyway, but for hosts whose
processors round an optimizer's step otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rpcmp.members import Member, member
from rpcmp.worker import bits
from rpcmp.worker.board import NEVER, Board, Key
from rpcmp.worker.model import StageModel

Ask = Callable[[str, Key], Callable[[], list[Any]]]
"""Asks for what another worker has on its board; what is returned waits for it."""


class Following:
    """One replica's side of it; on the compute thread.

    Args:
        own: which replica of which stage.
        model: its layers.
        board: where the others find what replica 0 has.
        ask: how to get it from there.
    """

    def __init__(self, own: Member, model: StageModel, board: Board, ask: Ask) -> None:
        self._own, self._model = own, model
        self._board, self._ask = board, ask
        self._begun = 0
        self._first: list[Tensor] = []

    def unite(self) -> None:
        """Begin as what replica 0 is.

        Raises:
            RpcmpError: replica 0 is gone.
        """
        self._begun += 1
        key = (NEVER, f"replicas begin {self._begun}")
        self._take_over(key, [*self._parameters(), *self._buffers()])
        self._first = [buffer.detach().clone() for buffer in self._buffers()]

    def begin_buffers(self, round_number: int) -> Callable[[], None]:
        """Begin to exchange the buffers as they are after a round; what is returned ends it.

        It raises an RpcmpError where replica 0 is gone.
        """
        buffers, key = self._buffers(), (round_number, "buffers")
        if not self._own.replica:
            pairs = zip(buffers, self._first, strict=True)
            self._post(key, [None if bits.are_equal(now, first) else now for now, first in pairs])
        if not self._own.replica or not buffers:
            return lambda: None
        answer = self._ask(member(self._own.stage), key)

        def end() -> None:
            triples = zip(buffers, answer(), self._first, strict=True)
            _copy((buffer, first if now is None else now) for buffer, now, first in triples)

        return end

    def parameters(self, round_number: int, step: int) -> None:
        """Take over the parameters after a step.

        Raises:
            RpcmpError: replica 0 is gone.
        """
        self._take_over((round_number, f"replicas after step {step}"), self._parameters())

    def _take_over(self, key: Key, tensors: Sequence[Tensor]) -> None:
        if not self._own.replica:
            self._post(key, tensors)
        elif tensors:
            found = self._ask(member(self._own.stage), key)()
            _copy(zip(tensors, found, strict=True))

    def _post(self, key: Key, tensors: Sequence[Tensor | None]) -> None:
        if tensors:
            self._board.post(key, tensors, self._own.num_replicas - 1)

    def _parameters(self) -> list[Tensor]:
        return [value for _, value in self._model.named_parameters()]

    def _buffers(self) -> list[Tensor]:
        return [
            buffer for module in self._model.modules() for buffer in module.buffers(recurse=False)
        ]


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)
