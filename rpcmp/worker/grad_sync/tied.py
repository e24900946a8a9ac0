"""A stage's part in parameters that several stages have.

    after the backward    others ──gradients──> the owner, who adds them in the order of the names
    after its step        the owner ──what the parameter has become──> others

See `rpcmp.pipelining.parameter_names` for why one owns it. Where a stage has replicas, each has the
sum over all of them first: then replica 0 speaks for its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rpcmp.config.topology import Member, member_name
from rpcmp.pipelining.assignment import TiedParameter
from rpcmp.worker.grad_sync.mailbox import NEVER, Key, TensorMailbox
from rpcmp.worker.model import StageModel

Fetch = Callable[[str, Key], list[Tensor]]


class TiedParameters:
    """What one worker does; all of it on the compute thread.

    Args:
        own: which worker.
        model: its layers.
        tied: where each parameter lies that lies in several places, its owner first.
        replicas: of each stage, how many.
        board: where others find what they want from here.
        fetch: what another worker has on its board; waits.
    """

    def __init__(
        self,
        own: Member,
        model: StageModel,
        tied: Sequence[Sequence[TiedParameter]],
        replicas: Callable[[str], int],
        board: TensorMailbox,
        fetch: Fetch,
    ) -> None:
        self._own = own
        self._tied = list(tied)
        self._replicas = replicas
        self._board, self._fetch = board, fetch
        self._parameters = dict(model.named_parameters())
        self._begun = 0

    def sum(self, round_number: int) -> None:
        """Send the gradients to the owners, and add up those that are owned here.

        Raises:
            RpcmpError: another stage has failed or is gone.
        """
        for places in self._tied:
            self._send(places, round_number)
        for places in self._tied:
            self._add(places, round_number)

    def unite(self) -> None:
        """Begin with the owners' parameters."""
        self._begun += 1
        self._take_over((NEVER, f"begin {self._begun}"))

    def stepped(self, round_number: int, step: int) -> None:
        """The optimizer has stepped.

        Raises:
            RpcmpError: an owner is gone.
        """
        self._take_over((round_number, f"step {step}"))

    def _send(self, places: Sequence[TiedParameter], round_number: int) -> None:
        owner, *others = places
        for place in others:
            if place.stage != self._own.stage or place.stage == owner.stage:
                continue
            parameter = self._parameters[place.name]
            if self._own.replica == 0:
                found = [] if parameter.grad is None else [parameter.grad]
                key = (round_number, f"gradient {place.name}")
                self._board.post(key, found, self._replicas(owner.stage))
            parameter.grad = None

    def _add(self, places: Sequence[TiedParameter], round_number: int) -> None:
        owner, *others = places
        if owner.stage != self._own.stage:
            return
        parameter = self._parameters[owner.name]
        total = parameter.grad
        for place in others:
            gradient = self._gradient(place, round_number)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        parameter.grad = total

    def _gradient(self, place: TiedParameter, round_number: int) -> Tensor | None:
        if place.stage == self._own.stage:
            here = self._parameters[place.name]
            gradient, here.grad = here.grad, None
            return gradient
        found = self._fetch(member_name(place.stage), (round_number, f"gradient {place.name}"))
        return found[0].to(self._device) if found else None

    def _take_over(self, key: Key) -> None:
        """Let every place have what the owner has."""
        number, when = key
        for owner, *others in self._tied:  # first what others wait for
            if (owner.stage, self._own.replica) == (self._own.stage, 0):
                away = {place.stage for place in others} - {owner.stage}
                takers = sum(map(self._replicas, away))
                name = (number, f"{when}, {owner.name}")
                self._board.post(name, [self._parameters[owner.name]], takers)
        for owner, *others in self._tied:
            here = [self._parameters[p.name] for p in others if p.stage == self._own.stage]
            if owner.stage == self._own.stage:
                _copy(self._parameters[owner.name], here)
            elif here:
                (value,) = self._fetch(member_name(owner.stage), (number, f"{when}, {owner.name}"))
                _copy(value, here)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device


def _copy(value: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(value)
