"""Which ways between processes a job uses, and what for. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rpcmp.graph import Graph
from rpcmp.members import DRIVER, Member

TENSORS = frozenset({"batches", "activations", "gradients", "snapshots"})
"""Of what is carried, what has tensors."""


@dataclass(frozen=True)
class Link:
    """Two processes that talk to each other.

    Attributes:
        one, other: labels of workers, or the driver's name, which is always the first.
        carries: what passes over it.
    """

    one: str
    other: str
    carries: tuple[str, ...]

    @property
    def has_tensors(self) -> bool:
        """Whether it matters how many bytes a second it carries."""
        return bool(TENSORS.intersection(self.carries))


def links(
    graph: Graph,
    workers: Sequence[Member],
    holders: Sequence[int | None],
    sends_batches: bool = True,
    tied: Sequence[Sequence[str]] = (),
) -> list[Link]:
    """Every link of a job, each once.

    Args:
        graph: which stage reads what.
        workers: in the config's order.
        holders: the index of the worker whose server holds each worker's snapshots as well.
        sends_batches: whether the driver loads the samples.
        tied: stages that have a parameter in common, its owner first.
    """
    found: dict[tuple[str, str], list[str]] = {}

    def add(one: str, other: str, what: str) -> None:
        pair = (one, other) if (other, one) not in found else (other, one)
        if what not in found.setdefault(pair, []):
            found[pair].append(what)

    labels = [worker.label for worker in workers]
    of_stage = {name: [w.label for w in workers if w.stage == name] for name in graph.stages}
    for worker in workers:
        is_given = sends_batches and graph.parts(worker.stage)
        add(DRIVER, worker.label, "batches" if is_given else "control")
    for name in graph.stages:
        for port in graph.ports(name):
            for one, other in itertools.product(of_stage[name], of_stage[port.reader]):
                add(one, other, "activations")
    for replicas in of_stage.values():
        for one, other in itertools.combinations(replicas, 2):
            add(one, other, "gradients")
    for owner, *others in tied:  # for its stage the first replica speaks
        for stage in others:
            for one, other in itertools.product(of_stage[owner], of_stage[stage]):
                if one == of_stage[owner][0] or other == of_stage[stage][0]:
                    add(one, other, "gradients")
    for label, holder in zip(labels, holders, strict=True):
        if holder is not None:
            add(label, labels[holder], "snapshots")
    for label in labels[1:]:
        add(labels[0], label, "rendezvous")
    return [Link(*pair, tuple(carries)) for pair, carries in found.items()]
