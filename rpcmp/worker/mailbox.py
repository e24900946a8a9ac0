"""State that workers copy from each other: buffers, parameters, gradients of tied parameters.

    one worker   put(key, tensors) ──┐
    others       get(key) ───────────┴──> the tensors, once both have happened

A mailbox keeps tensors until all their readers have had them. Keys start with the number of a
round, so that no worker waits for tensors of a round that was aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp.config.topology import Member, member_name
from rpcmp.errors import RpcmpError, to_wire
from rpcmp.pipelining.assignment import TiedParameter
from rpcmp.rpc.messages import Peer, TensorKey
from rpcmp.rpc.tensors import same_bits
from rpcmp.rpc.transport import Raised, result
from rpcmp.worker.model import StageModel

NEVER = 2**62
"""In place of a round's number, for tensors that no abort concerns."""


@dataclass
class _MailboxEntry:
    tensors: list[Tensor | None] | None = None
    unread: int = 0
    waiting: list[Future[Any]] = field(default_factory=list)


class TensorMailbox:
    """One worker's tensors for others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[TensorKey, _MailboxEntry] = {}
        self._aborted: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: TensorKey, tensors: Sequence[Tensor | None], readers: int) -> None:
        """Keep copies of these tensors for a number of readers; None stays None."""
        with self._lock:
            if not readers or key[0] in self._aborted:
                return
            entry = self._entries.setdefault(key, _MailboxEntry())
            entry.tensors = [None if t is None else t.detach().cpu().clone() for t in tensors]
            entry.unread += readers
            waiting, entry.waiting = entry.waiting, []
            self._mark_read(key, len(waiting))
        for answer in waiting:
            answer.set_result(entry.tensors)

    def get(self, key: TensorKey) -> Future[Any]:
        """Return a future of the tensors for one reader: a list, or a Raised."""
        answer: Future[Any] = Future()
        value: Any = None
        with self._lock:
            if key[0] in self._aborted:
                value = Raised(self._aborted[key[0]])
            else:
                entry = self._entries.setdefault(key, _MailboxEntry())
                value = entry.tensors
                if value is None:
                    entry.waiting.append(answer)
                else:
                    self._mark_read(key, 1)
        if value is not None:
            answer.set_result(value)
        return answer

    def abort(self, first: int, last: int, error: RpcmpError) -> None:
        """Fail all that wait for tensors of the rounds from `first` to `last`."""
        raised = to_wire(error)
        with self._lock:
            self._aborted.update(dict.fromkeys(range(first, last + 1), raised))
            keys = [key for key in self._entries if key[0] in self._aborted]
            dropped = [self._entries.pop(key) for key in keys]
        for answer in (answer for entry in dropped for answer in entry.waiting):
            answer.set_result(Raised(raised))

    def _mark_read(self, key: TensorKey, count: int) -> None:
        entry = self._entries[key]
        entry.unread -= count
        if entry.unread <= 0:
            del self._entries[key]


class ReplicaBroadcast:
    """Copies state of replica 0 to the other replicas of its stage; on the compute thread.

        when the group forms    parameters and buffers
        after each round        buffers
        after each step         parameters, if hosts differ

    Batch normalization's running statistics depend on the micro-batches that a replica computes.
    Those of replica 0 count, as under DistributedDataParallel. They are final after the round's
    last backward, so they travel while the gradients are summed. Buffers that still have their
    initial value, such as masks and tables of positions, do not travel. Parameters are equal
    anyway, except between hosts whose processors round an optimizer's step differently.
    """

    def __init__(self, own: Member, model: StageModel, mailbox: TensorMailbox, first: Peer) -> None:
        self._own, self._model = own, model
        self._mailbox, self._first = mailbox, first
        self._num_syncs = 0
        self._initial_buffers: list[Tensor] = []

    def sync_initial_state(self) -> None:
        if self._own.num_replicas == 1:
            return
        self._num_syncs += 1
        key = (NEVER, f"replicas start {self._num_syncs}")
        self._copy_from_first(key, [*self._parameters(), *self._buffers()])
        self._initial_buffers = [buffer.detach().clone() for buffer in self._buffers()]

    def start_buffers(self, round_number: int) -> Callable[[], None]:
        """Start to exchange the buffers of a round; return a function that waits for them."""
        buffers, key = self._buffers(), (round_number, "buffers")
        if not buffers or self._own.num_replicas == 1:
            return lambda: None
        initial = self._initial_buffers
        if not self._own.replica:
            pairs = zip(buffers, initial, strict=True)
            self._put(key, [None if same_bits(now, first) else now for now, first in pairs])
            return lambda: None
        answer = self._first.get_tensors(key)

        def finish() -> None:
            values = result(answer, self._first.name)
            triples = zip(buffers, values, initial, strict=True)
            copy_all((buffer, first if now is None else now) for buffer, now, first in triples)

        return finish

    def copy_parameters(self, round_number: int, step: int) -> None:
        self._copy_from_first((round_number, f"replicas after step {step}"), self._parameters())

    def _copy_from_first(self, key: TensorKey, tensors: Sequence[Tensor]) -> None:
        if not self._own.replica:
            self._put(key, tensors)
        elif tensors:
            values = result(self._first.get_tensors(key), self._first.name)
            copy_all(zip(tensors, values, strict=True))

    def _put(self, key: TensorKey, tensors: Sequence[Tensor | None]) -> None:
        if tensors:
            self._mailbox.put(key, tensors, self._own.num_replicas - 1)

    def _parameters(self) -> list[Tensor]:
        return [value for _, value in self._model.named_parameters()]

    def _buffers(self) -> list[Tensor]:
        return [
            buffer for module in self._model.modules() for buffer in module.buffers(recurse=False)
        ]


class TiedParameters:
    """The parameters that this worker shares with other stages; on the compute thread.

        after the backward      others ──gradients──> the owner, which adds them, by their names
        after the owner's step  the owner ──the parameter's value──> others

    See `rpcmp.pipelining.parameter_names` for why one stage owns a parameter. If a stage has
    replicas, all of them first get the sum over replicas, and replica 0 exchanges for its stage.

    Args:
        tied: the stages and names of each tied parameter, its owner first.
        num_replicas: returns the number of replicas of a stage.
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
        """Send gradients to the owners, and add up the gradients of the parameters owned here."""
        for owner, *copies in self._tied:
            for copy in copies:
                if copy.stage == self._own.stage != owner.stage:
                    self._send(copy, owner.stage, round_number)
        for owner, *copies in self._tied:
            if owner.stage == self._own.stage:
                self._add(owner, copies, round_number)

    def sync_initial_state(self) -> None:
        self._num_syncs += 1
        self._copy_from_owners(NEVER, f"start {self._num_syncs}")

    def after_step(self, round_number: int, step: int) -> None:
        """Copy the owners' values after an optimizer step."""
        self._copy_from_owners(round_number, f"step {step}")

    def _send(self, copy: TiedParameter, owner: str, round_number: int) -> None:
        parameter = self._parameters[copy.name]
        if self._own.replica == 0:
            tensors = [] if parameter.grad is None else [parameter.grad]
            key = (round_number, f"gradient {copy.name}")
            self._mailbox.put(key, tensors, self._num_replicas(owner))
        parameter.grad = None

    def _add(
        self, owner: TiedParameter, copies: Sequence[TiedParameter], round_number: int
    ) -> None:
        parameter = self._parameters[owner.name]
        total = parameter.grad
        for copy in copies:
            gradient = self._gradient(copy, round_number)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        parameter.grad = total

    def _gradient(self, copy: TiedParameter, round_number: int) -> Tensor | None:
        if copy.stage == self._own.stage:
            parameter = self._parameters[copy.name]
            gradient, parameter.grad = parameter.grad, None
            return gradient
        tensors = self._fetch(copy.stage, (round_number, f"gradient {copy.name}"))
        return tensors[0].to(self._device) if tensors else None

    def _copy_from_owners(self, round_number: int, moment: str) -> None:
        def key(owner: TiedParameter) -> TensorKey:
            return round_number, f"{moment}, {owner.name}"

        for owner, *copies in self._tied:  # first what other workers wait for
            if (owner.stage, self._own.replica) == (self._own.stage, 0):
                reading = {copy.stage for copy in copies} - {owner.stage}
                readers = sum(map(self._num_replicas, reading))
                self._mailbox.put(key(owner), [self._parameters[owner.name]], readers)
        for owner, *copies in self._tied:
            own = [self._parameters[c.name] for c in copies if c.stage == self._own.stage]
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


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in pairs:
            tensor.copy_(value)
