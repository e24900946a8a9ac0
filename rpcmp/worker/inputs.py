"""What a stage reads for a bundle of micro-batches: other stages' answers, slices of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.futures import Future

from rpcmp.graph import SOURCES, Graph, Port, Reference
from rpcmp.members import member
from rpcmp.transport import NOBODY, Transport, when_all
from rpcmp.turns import Share, Turns
from rpcmp.work import Bundle, Mode
from rpcmp.worker.feed import Feed
from rpcmp.worker.slices import Slices


class Inputs:
    """The inputs of one stage.

    Args:
        graph: who reads whom.
        stage: whose inputs.
        own: which bundles this replica of it computes.
        turns: which replica of another stage computes which.
        forward: the method by which another stage is asked, with a bundle and a port.
        peers: the other members of the group.
        feed: what this stage loads itself; None: the driver has all of the batch.

    Attributes:
        references: what it reads, in order.
        ports: for each of them, which of its producer's ports this is; 0 for what the batch gives.
    """

    def __init__(
        self,
        graph: Graph,
        stage: str,
        own: Share,
        turns: Callable[[str], Turns],
        forward: Callable[..., Future[Any]],
        peers: Transport,
        feed: Feed | None = None,
    ) -> None:
        self.references = graph.inputs[stage]
        self.ports = [_port(graph, stage, index) for index in range(len(self.references))]
        self._is_sink = graph.sink == stage
        self._forward = forward
        self._peers = peers
        self._slices = Slices(own, peers)
        self._feed = feed
        self._turns = {
            reference.producer: turns(reference.producer)
            for reference in self.references
            if not reference.from_batch
        }

    def ask(self, bundle: Bundle, callback: Callable[[list[Any]], None]) -> None:
        """Ask for all that a forward needs; `callback` gets the answers.

        They are in the order of the references, for a sink that needs them the targets last: a list
        of Outputs, one a micro-batch, or a Raised.
        """
        asked = [self._ask_one(bundle, index) for index in range(len(self.references))]
        if self._is_sink and bundle.mode is not Mode.PREDICT:
            targets = self._ask_batch(bundle, Reference(SOURCES[1]), len(self.references))
            asked.append((NOBODY, targets))
        when_all(asked, callback)

    def forget(self, last: int) -> None:
        """Let go of what was asked for and will not be taken: rounds up to `last` were aborted."""
        self._slices.forget()
        if self._feed is not None:
            self._feed.forget(last)

    def producer(self, index: int, bundle: Bundle) -> str:
        """The worker that computes input `index` of a bundle."""
        stage = self.references[index].producer
        return member(stage, self._turns[stage].owner(bundle.number))

    def _ask_one(self, bundle: Bundle, index: int) -> tuple[str, Future[Any]]:
        reference = self.references[index]
        if reference.from_batch:
            return NOBODY, self._ask_batch(bundle, reference, index)
        producer = self.producer(index, bundle)
        return producer, self._peers.call(producer, self._forward, bundle, self.ports[index])

    def _ask_batch(self, bundle: Bundle, reference: Reference, index: int) -> Future[Any]:
        if self._feed is not None and bundle.works[0].drawn:
            return self._feed.get(bundle, reference)
        return self._slices.get(bundle, reference.producer, reference.path, index)


def _port(graph: Graph, stage: str, index: int) -> int:
    reference = graph.inputs[stage][index]
    if reference.from_batch:
        return 0
    return graph.ports(reference.producer).index(Port(stage, index, reference.path))
