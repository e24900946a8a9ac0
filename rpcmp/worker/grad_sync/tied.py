"""Parameters that several stages share, at one of these stages.

    after the backward      others ──gradients──> the owner, which adds them in the order of names
    after the owner's step  the owner ──the parameter's value──> others

See `rpcmp.pipelining.parameter_names` for why one stage owns a parameter. If a stage has replicas,
all of them first get the sum over replicas, and replica 0 exchanges for its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rpcmp.config.topology import Member, member_name
from rpcmp.pipelining.assignment import TiedParameter
from rpcmp.rpc.messages import Peer, TensorKey
from rpcmp.rpc.transport import result
from rpcmp.worker.grad_sync.mailbox import NEVER, TensorMailbox, copy_all
from rpcmp.worker.model import StageModel


class TiedParameters:
    """The tied parameters of one worker; on the compute thread.

    Args:
        own: this worker.
        tied: the places of each tied parameter, its owner first.
        num_replicas: returns the number of replicas of a stage.
        mailbox: of this worker.
        peer: returns another worker by its name.
    """

    def __init__(
        self,
        own: Member,
        model: StageModel,
        tied: Sequence[Sequence[TiedParameter]],
        num_replicas: Callable[[str], int],
        mailbox: TensorMailbox,
        peer: Callable[[str], Peer],
    ) -> None:
        self._own = own
        self._tied = list(tied)
        self._num_replicas = num_replicas
        self._mailbox, self._peer = mailbox, peer
        self._parameters = dict(model.named_parameters())
        self._num_syncs = 0

    def sum(self, round_number: int) -> None:
        """Send gradients to the owners, and add up those of the parameters owned here."""
        for places in self._tied:
            self._send(places, round_number)
        for places in self._tied:
            self._add(places, round_number)

    def sync_initial_state(self) -> None:
        self._num_syncs += 1
        self._copy_from_owners(NEVER, f"begin {self._num_syncs}")

    def after_step(self, round_number: int, step: int) -> None:
        """Copy the owners' values after an optimizer step."""
        self._copy_from_owners(round_number, f"step {step}")

    def _send(self, places: Sequence[TiedParameter], round_number: int) -> None:
        owner, *others = places
        for place in others:
            if place.stage != self._own.stage or place.stage == owner.stage:
                continue
            parameter = self._parameters[place.name]
            if self._own.replica == 0:
                tensors = [] if parameter.grad is None else [parameter.grad]
                key = (round_number, f"gradient {place.name}")
                self._mailbox.put(key, tensors, self._num_replicas(owner.stage))
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
            parameter = self._parameters[place.name]
            gradient, parameter.grad = parameter.grad, None
            return gradient
        tensors = self._fetch(place.stage, (round_number, f"gradient {place.name}"))
        return tensors[0].to(self._device) if tensors else None

    def _copy_from_owners(self, round_number: int, moment: str) -> None:
        def key(owner: TiedParameter) -> TensorKey:
            return round_number, f"{moment}, {owner.name}"

        for owner, *others in self._tied:  # first what other workers wait for
            if (owner.stage, self._own.replica) == (self._own.stage, 0):
                reading = {place.stage for place in others} - {owner.stage}
                readers = sum(map(self._num_replicas, reading))
                self._mailbox.put(key(owner), [self._parameters[owner.name]], readers)
        for owner, *others in self._tied:
            own = [self._parameters[p.name] for p in others if p.stage == self._own.stage]
            if owner.stage == self._own.stage:
                copy_all((parameter, self._parameters[owner.name]) for parameter in own)
            elif own:
                (value,) = self._fetch(owner.stage, key(owner))
                copy_all((parameter, value) for parameter in own)

    def _fetch(self, stage: str, key: TensorKey) -> list[Tensor]:
        peer = self._peer(member_name(stage))
        tensors: list[Tensor] = result(peer.get_tensors(key), peer.name)
        return tensors

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device
