"""Which ways between processes a job uses, and what for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rpcmp.graph import Graph
from rpcmp.members import DRIVER

TENSORS = frozenset({"batches", "activations", "snapshots"})
"""Of what is carried, what has tensors."""


@dataclass(frozen=True)
class Link:
    """Two processes that talk to each other.

    Attributes:
        one, other: names of stages, or the driver's, which is always the first.
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
    names: Sequence[str],
    holders: Sequence[int | None],
    sends_batches: bool = True,
) -> list[Link]:
    """Every link of a job, each once.

    Args:
        graph: which stage reads what.
        names: of the stages, in the config's order.
        holders: the index of the stage whose server holds each stage's snapshots as well.
        sends_batches: whether the driver loads the samples.
    """
    found: dict[tuple[str, str], list[str]] = {}

    def add(one: str, other: str, what: str) -> None:
        pair = (one, other) if (other, one) not in found else (other, one)
        if what not in found.setdefault(pair, []):
            found[pair].append(what)

    for name in names:
        add(DRIVER, name, "batches" if sends_batches and graph.parts(name) else "control")
    for name in graph.stages:
        for port in graph.ports(name):
            add(name, port.reader, "activations")
    for name, holder in zip(names, holders, strict=True):
        if holder is not None:
            add(name, names[holder], "snapshots")
    for name in names[1:]:
        add(names[0], name, "rendezvous")
    return [Link(*pair, tuple(carries)) for pair, carries in found.items()]
