"""Slices of the batch: held by the driver, and fetched by the stages that need them.

    stage   SliceFetcher.get ──one request per GROUP micro-batches──> BatchServer.slices   driver

A request per micro-batch would double the messages of a stage that reads the batch. A request for
all of them would make a stage hold more memory the more micro-batches a mini-batch has.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from rpcmp.config.topology import DRIVER, SOURCES, ReplicaShare
from rpcmp.errors import ConfigError
from rpcmp.pipelining import pytree
from rpcmp.rpc.messages import Bundle, LossWeight, StageOutputs
from rpcmp.rpc.shared_memory import SharedTensor, is_worth_sharing
from rpcmp.rpc.transport import NOBODY, Raised, Transport, attempt, outcome, when_all

GROUP = 8
"""Micro-batches per request."""


class BatchServer:
    """Slices of the mini-batches in progress; the RPC service of the driver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slices: dict[tuple[int, str, int], StageOutputs] = {}

    def load(
        self,
        round_number: int,
        inputs: list[Any],
        targets: list[Any] | None,
        weights: Sequence[LossWeight] = (),
    ) -> None:
        """Hold a round's slices, one per micro-batch, until `clear`.

        Args:
            weights: what the loss counts in each slice of the targets; empty: samples.
        """
        with self._lock:
            for kind, slices in zip(SOURCES, (inputs, targets or []), strict=True):
                for microbatch, part in enumerate(slices):
                    self._slices[round_number, kind, microbatch] = StageOutputs(part)
            for microbatch, weight in enumerate(weights):
                key = round_number, SOURCES[1], microbatch
                self._slices[key] = self._slices[key]._replace(weight=weight)

    def clear(self, round_number: int) -> None:
        with self._lock:
            for key in [key for key in self._slices if key[0] == round_number]:
                del self._slices[key]

    def slices(
        self,
        round_number: int,
        kind: str,
        path: tuple[str, ...],
        microbatches: list[int],
        shares_memory: bool = False,
    ) -> list[StageOutputs]:
        """Return the inputs or targets of some micro-batches, or the part of them at `path`.

        Args:
            shares_memory: whether the stage can take tensors from this process's memory.
        """
        with self._lock:
            found = [self._slices.get((round_number, kind, index)) for index in microbatches]
        slices = [part for part in found if part is not None]
        if len(slices) < len(found):
            raise ConfigError(f"the batch of round {round_number} has no {kind}s")
        try:
            values = [pytree.select(part.value, path) for part in slices]
        except LookupError as error:
            raise ConfigError(f"a stage reads {'.'.join((kind, *path))!r}: {error}") from error
        if shares_memory:
            values = [pytree.map_tensors(_placed, value) for value in values]
        parts = [part._replace(value=value) for part, value in zip(slices, values, strict=True)]
        return [part.lent() for part in parts] if shares_memory else parts  # now none can fail


def _placed(tensor: Tensor) -> Tensor | SharedTensor:
    """Place what is dense; torch RPC keeps other strides, on which bits may depend.

    Strides count where there is one element as well: convolutions choose their order by them.
    """
    if tensor.layout is not torch.strided or not is_worth_sharing([tensor]):
        return tensor
    strides = torch.empty(tensor.shape, device="meta").stride()
    return Transport().memory.place(tensor) if tensor.stride() == strides else tensor


class _Key(NamedTuple):
    round: int
    kind: str
    path: tuple[str, ...]
    reader: int
    group: int


class SliceFetcher:
    """Slices that were requested and not taken yet. Thread-safe.

    Args:
        own: the bundles that this worker computes, and for which alone it fetches.
    """

    def __init__(self, own: ReplicaShare, peers: Transport) -> None:
        self._own = own
        self._peers = peers
        self._lock = threading.Lock()
        self._caller = ThreadPoolExecutor(1, "rpcmp-slices")
        self._groups: dict[_Key, Future[Any]] = {}
        self._left: dict[_Key, int] = {}

    def get(self, bundle: Bundle, kind: str, path: tuple[str, ...], reader: int) -> Future[Any]:
        """Return StageOutputs per micro-batch of a bundle, or a Raised; called once per bundle.

        Args:
            kind, path: see `BatchServer.slices`.
            reader: index of the stage's input. Each input gets its own tensors, so that a layer
                that works in place changes no other input.
        """
        header = bundle.round
        own = header.indices_in(self._own.numbers(header.num_bundles))
        positions = [own.index(index) for index in header.indices_in([bundle.number])]
        with self._lock:
            groups = [self._take_group(bundle, own, at, kind, path, reader) for at in positions]
        answer: Future[Any] = Future()

        def arrived(answers: list[Any]) -> None:
            failed = next((group for group in answers if isinstance(group, Raised)), None)
            slices = zip(positions, answers, strict=True)
            answer.set_result(failed or [group[at % GROUP] for at, group in slices])

        when_all([(NOBODY, group) for group in groups], arrived)
        return answer

    def _take_group(
        self,
        bundle: Bundle,
        own: Sequence[int],
        position: int,
        kind: str,
        path: tuple[str, ...],
        reader: int,
    ) -> Future[Any]:
        """Return the slices of the group with the micro-batch `own[position]`."""
        key = _Key(bundle.round.number, kind, path, reader, position // GROUP)
        group = self._groups.get(key)
        if group is None:
            wanted = list(own[key.group * GROUP :][:GROUP])
            group = self._fetch(bundle.round.number, kind, path, wanted)
            self._groups[key], self._left[key] = group, len(wanted)
        self._left[key] -= 1
        if not self._left[key]:
            del self._groups[key], self._left[key]
        return group

    def _fetch(self, *request: Any) -> Future[Any]:
        """Request slices of the driver, on a thread outside the micro-batch's autograd context.

        Inside it, torch would make the driver a member of the context, which costs one more message
        to clean up.
        """
        answer: Future[Any] = Future()

        def ask() -> None:
            # stage.py [5]
            called = attempt(
                lambda: self._peers.call(
                    DRIVER, BatchServer.slices, *request, self._peers.shares_memory(DRIVER)
                )
            )
            if isinstance(called, Raised):
                answer.set_result(called)
            else:
                called.add_done_callback(lambda done: answer.set_result(outcome(done, DRIVER)))

        self._caller.submit(ask)
        return answer

    def forget(self) -> None:
        """Drop what was requested and will not be taken, since a round was aborted."""
        with self._lock:
            self._groups.clear()
            self._left.clear()
