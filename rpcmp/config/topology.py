"""Which stage reads what: a directed acyclic graph of stages.

        input ──> image ──────┐
          │                   v
          └─────> profile ─> classifier ──> loss
          └──────────────────^

Stages name what they read: another stage ("image"), a part of its output ("image.features"), the
batch's inputs ("input", "input.profile") or targets ("target"). The graph has one sink, the stage
that nobody reads; the driver asks it for the loss. Pure: no torch, no processes.

Who takes part in an RPC group: every replica of every stage, and then the driver.

Ranks follow the config: its stages in order, of each its replicas in order, then the driver.

Which replica of a stage computes which bundle of micro-batches: by a fixed rule.

With equal shares in turn, 0 1 2 0 1 2; with shares [2, 1] as evenly mixed as can be, 0 1 0 0 1 0.
The rule knows only the config, so a run that is replayed, resumed or done again in one process has
every micro-batch where it was, and with it every sum of gradients. Pure.

The mixing is the smooth weighted round-robin of nginx (ngx_http_upstream_round_robin.c): each
turn every replica gains its share, and the richest one pays the sum of all shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rpcmp.config.suggestion import did_you_mean, nearest
from rpcmp.errors import ConfigError

SOURCES = ("input", "target")
"""What the driver serves; not allowed as names of stages."""


@dataclass(frozen=True)
class Reference:
    """One entry of a stage's `inputs`: a producer and the part of its output that is read."""

    producer: str
    path: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Reference:
        """The reference written as "producer" or "producer.key.key"."""
        producer, *path = text.split(".")
        return cls(producer, tuple(path))

    @property
    def from_batch(self) -> bool:
        """Whether the driver serves it, rather than a stage."""
        return self.producer in SOURCES

    def __str__(self) -> str:
        return ".".join((self.producer, *self.path))


@dataclass(frozen=True)
class Port:
    """One edge as its producer sees it: who reads, as which input, and which part."""

    reader: str
    input_index: int
    path: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Stages in an order in which every stage comes after all that it reads.

    Attributes:
        inputs: for each stage, in topological order, what it reads.
    """

    inputs: Mapping[str, tuple[Reference, ...]]

    @property
    def stages(self) -> tuple[str, ...]:
        """Names, in topological order; where that leaves a choice, in the config's order."""
        return tuple(self.inputs)

    @property
    def sink(self) -> str:
        """The stage whose output the loss is computed from."""
        return self.stages[-1]

    def ports(self, stage: str) -> tuple[Port, ...]:
        """Who reads `stage`, in the order in which the stages run."""
        return tuple(
            Port(reader, index, reference.path)
            for reader, references in self.inputs.items()
            for index, reference in enumerate(references)
            if reference.producer == stage
        )

    def parts(self, stage: str) -> tuple[Reference, ...]:
        """What `stage` reads of the batch, each part once; the sink needs the targets."""
        read = [reference for reference in self.inputs[stage] if reference.from_batch]
        needed = [*read, Reference(SOURCES[1])] if stage == self.sink else read
        return tuple(dict.fromkeys(needed))

    def depth(self, stage: str, count: Callable[[str], int] = lambda stage: 1) -> int:
        """Stages on the longest way from `stage` to the sink, both included.

        Args:
            stage: where the way begins.
            count: as how many a stage counts.
        """
        readers = {port.reader for port in self.ports(stage)}
        return count(stage) + max((self.depth(reader, count) for reader in readers), default=0)


def chain_graph(names: Sequence[str]) -> Graph:
    """The graph of stages that each read the one before."""
    sources = ["input", *names[:-1]]
    return Graph({name: (Reference(source),) for name, source in zip(names, sources, strict=True)})


def build_graph(inputs: Mapping[str, Sequence[str]]) -> Graph:
    """The graph of named stages.

    Args:
        inputs: for each stage, in the config's order, the references that it reads.

    Raises:
        ConfigError: a reference to nothing, a cycle, a stage that reads nothing, or more than one
            stage that nobody reads.
    """
    parsed = {name: tuple(map(Reference.parse, references)) for name, references in inputs.items()}
    for name, references in parsed.items():
        _check_references(name, references, list(parsed))
    graph = Graph({name: parsed[name] for name in _topological(parsed)})
    sinks = [name for name in graph.stages if not graph.ports(name)]
    if len(sinks) != 1:
        raise ConfigError(
            f"nobody reads the stages {', '.join(map(repr, sinks))}; the loss needs exactly one "
            "last stage: list the others in the `inputs` of some stage or remove them"
        )
    return graph


def _check_references(name: str, references: Sequence[Reference], stages: list[str]) -> None:
    if not references:
        raise ConfigError(f'stage {name!r} reads nothing; give it inputs = ["input"] or a stage')
    for reference in references:
        if reference.producer not in (*stages, *SOURCES):
            hint = did_you_mean(nearest(reference.producer, [*stages, *SOURCES]))
            raise ConfigError(
                f"stage {name!r} reads {str(reference)!r}, but there is no stage "
                f"{reference.producer!r}{hint}"
            )


def _topological(inputs: Mapping[str, Sequence[Reference]]) -> list[str]:
    """Kahn's algorithm, always taking the first stage that can go: keeps the config's order."""
    order: list[str] = []
    waiting = list(inputs)
    while waiting:
        for name in waiting:
            if all(ref.from_batch or ref.producer in order for ref in inputs[name]):
                break
        else:
            raise ConfigError(f"`inputs` form a cycle: {' reads '.join(_cycle(inputs, waiting))}")
        order.append(name)
        waiting.remove(name)
    return order


def _cycle(inputs: Mapping[str, Sequence[Reference]], waiting: Sequence[str]) -> list[str]:
    """One cycle among `waiting`, which all depend on one; follow any unmet input until a repeat."""
    path = [waiting[0]]
    while True:
        producer = next(ref.producer for ref in inputs[path[-1]] if ref.producer in waiting)
        if producer in path:
            return [repr(name) for name in [*path[path.index(producer) :], producer]]
        path.append(producer)


DRIVER = "driver"
"""The driver's name; no stage can have it."""


@dataclass(frozen=True)
class Member:
    """One worker: a replica of a stage.

    Attributes:
        stage: the stage's name.
        stage_index: its place in the config.
        replica: which of its replicas, from 0.
        num_replicas: how many it has.
    """

    stage: str
    stage_index: int
    replica: int = 0
    num_replicas: int = 1

    @property
    def name(self) -> str:
        """Its name in the group."""
        return member_name(self.stage, self.replica)

    @property
    def label(self) -> str:
        """Its name wherever people read it: a stage's only replica goes by the stage's name."""
        return self.stage if self.num_replicas == 1 else self.name


def member_name(stage_name: str, replica: int = 0) -> str:
    """A worker's name in the group."""
    return f"{stage_name}:{replica}"


def member_names(workers: Iterable[Member]) -> list[str]:
    """All names, by rank."""
    return [*(worker.name for worker in workers), DRIVER]


def num_bundles(num_microbatches: int, per_message: int) -> int:
    """Bundles of a mini-batch, if at most `per_message` micro-batches share a message."""
    return -(-num_microbatches // per_message)


class ReplicaAssignment:
    """The turns of the replicas of one stage.

    Args:
        shares: how many of `sum(shares)` consecutive bundles each replica takes; one a replica.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.num_replicas = len(shares)
        divisor = math.gcd(*shares)
        self._shares = [share // divisor for share in shares]
        self._numbers: dict[tuple[int, int], list[int]] = {}

    def owner(self, bundle: int) -> int:
        """The replica that computes a bundle, by its number in the round."""
        return self._cycle[bundle % len(self._cycle)]

    def numbers(self, replica: int, num_bundles: int) -> list[int]:
        """The bundles of a round that a replica computes, in order; none where others suffice."""
        found = self._numbers.get((replica, num_bundles))
        if found is None:  # it is asked for every bundle, and a job has few numbers of bundles
            found = [bundle for bundle in range(num_bundles) if self.owner(bundle) == replica]
            self._numbers[replica, num_bundles] = found
        return found

    def most(self, num_bundles: int) -> int:
        """The most bundles of a round that any replica computes."""
        return max(len(self.numbers(r, num_bundles)) for r in range(self.num_replicas))

    @cached_property
    def _cycle(self) -> list[int]:
        total, found = sum(self._shares), []
        gained = [0] * self.num_replicas
        for _ in range(total):
            gained = [have + share for have, share in zip(gained, self._shares, strict=True)]
            richest = max(range(self.num_replicas), key=gained.__getitem__)
            gained[richest] -= total
            found.append(richest)
        return found


class ReplicaShare(NamedTuple):
    """One replica's part of every round."""

    turns: ReplicaAssignment
    replica: int

    def numbers(self, num_bundles: int) -> list[int]:
        """The bundles that it computes of a round of so many, in order."""
        return self.turns.numbers(self.replica, num_bundles)


def shares_by_speed(seconds: Sequence[float], num_bundles: int) -> list[int]:
    """The shares with which replicas of unequal speed end a round soonest.

    One bundle after the other goes to whoever would end it first; of equals, to the first.

    Args:
        seconds: that each replica takes for a bundle.
        num_bundles: of a round.
    """
    shares = [0] * len(seconds)
    for _ in range(max(num_bundles, len(seconds))):
        ends = [(share + 1) * each for share, each in zip(shares, seconds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return [max(1, share) for share in shares]
