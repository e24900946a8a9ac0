"""The topology of a job: the graph of its stages, its workers, and what each replica computes.

The stages form a directed acyclic graph.

        input ──> image ──────┐
          │                   v
          └─────> profile ─> classifier ──> loss
          └──────────────────^

Stages name what they read: another stage ("image"), a part of its output ("image.features"), the
batch's inputs ("input", "input.profile") or targets ("target"). The graph has one sink, the stage
that no other stage reads; it computes the loss. Pure: no torch, no processes.

The members of an RPC group are every replica of every stage, and the driver. Ranks follow the
config: the replicas of its stages, in order, then the driver.

A fixed rule assigns bundles of micro-batches to the replicas of a stage: with equal shares in turn,
0 1 2 0 1 2; with shares [2, 1] mixed as evenly as possible, 0 1 0 0 1 0. The rule depends only on
the config, so a run that is replayed, resumed or repeated in one process has every micro-batch at
the same replica, and with it every sum of gradients.

The mixing is the smooth weighted round-robin of nginx (ngx_http_upstream_round_robin.c): each
turn every replica gains its share, and the richest one pays the sum of all shares.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from rpcmp.errors import ConfigError, did_you_mean, nearest

SOURCES = ("input", "target")
"""The parts of a batch, which the driver serves; not allowed as names of stages."""


@dataclass(frozen=True)
class Reference:
    """One entry of a stage's `inputs`: a producer and the part of its output that is read."""

    producer: str
    path: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse "producer" or "producer.key.key"."""
        producer, *path = text.split(".")
        return cls(producer, tuple(path))

    @property
    def from_batch(self) -> bool:
        return self.producer in SOURCES

    def __str__(self) -> str:
        return ".".join((self.producer, *self.path))


@dataclass(frozen=True)
class Port:
    """One edge as its producer sees it: the reader, the number of its input, and the part."""

    reader: str
    input_index: int
    path: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Stages in an order in which every stage comes after all that it reads.

    Attributes:
        inputs: the references of each stage, in topological order.
    """

    inputs: Mapping[str, tuple[Reference, ...]]

    @property
    def stages(self) -> tuple[str, ...]:
        """Names, in topological order; ties are broken by the config's order."""
        return tuple(self.inputs)

    @property
    def sink(self) -> str:
        """The stage whose output the loss is computed from."""
        return self.stages[-1]

    def ports(self, stage: str) -> tuple[Port, ...]:
        """Return the edges from `stage`, in the order in which their readers run."""
        return tuple(self._ports.get(stage, ()))

    @functools.cached_property
    def _ports(self) -> dict[str, list[Port]]:
        found: dict[str, list[Port]] = {}
        for reader, references in self.inputs.items():
            for index, reference in enumerate(references):
                port = Port(reader, index, reference.path)
                found.setdefault(reference.producer, []).append(port)
        return found

    def parts(self, stage: str) -> tuple[Reference, ...]:
        """Return the parts of the batch that `stage` reads, each once; the sink needs targets."""
        read = [reference for reference in self.inputs[stage] if reference.from_batch]
        needed = [*read, Reference(SOURCES[1])] if stage == self.sink else read
        return tuple(dict.fromkeys(needed))

    def depths(self, count: Callable[[str], int] = lambda stage: 1) -> dict[str, int]:
        """Return the length of the longest way from each stage to the sink, both included."""
        found: dict[str, int] = {}
        for stage in reversed(self.stages):
            readers = (found[port.reader] for port in self.ports(stage))
            found[stage] = count(stage) + max(readers, default=0)
        return {stage: found[stage] for stage in self.stages}


def chain_graph(names: Sequence[str]) -> Graph:
    """Return the graph of stages that each read the one before."""
    sources = ["input", *names[:-1]]
    return Graph({name: (Reference(source),) for name, source in zip(names, sources, strict=True)})


def build_graph(inputs: Mapping[str, Sequence[str]]) -> Graph:
    """Return the graph of named stages.

    Raises:
        ConfigError: a reference to nothing, a cycle, a stage that reads nothing, or more than one
            stage that no other stage reads.
    """
    parsed = {name: tuple(map(Reference.parse, references)) for name, references in inputs.items()}
    for name, references in parsed.items():
        _check_references(name, references, parsed)
    graph = Graph({name: parsed[name] for name in _topological(parsed)})
    sinks = [name for name in graph.stages if not graph.ports(name)]
    if len(sinks) != 1:
        raise ConfigError(
            f"no stage reads {', '.join(map(repr, sinks))}; the loss needs exactly one "
            "last stage: list the others in the `inputs` of some stage or remove them"
        )
    return graph


def _check_references(name: str, references: Sequence[Reference], stages: Collection[str]) -> None:
    if not references:
        raise ConfigError(f'stage {name!r} reads nothing; give it inputs = ["input"] or a stage')
    for reference in references:
        if not (reference.from_batch or reference.producer in stages):
            hint = did_you_mean(nearest(reference.producer, [*stages, *SOURCES]))
            raise ConfigError(
                f"stage {name!r} reads {str(reference)!r}, but there is no stage "
                f"{reference.producer!r}{hint}"
            )


def _topological(inputs: Mapping[str, Sequence[Reference]]) -> list[str]:
    """Return the stages in order; always the first that is ready, in the config's order (Kahn)."""
    read = {
        name: {reference.producer for reference in references if not reference.from_batch}
        for name, references in inputs.items()
    }
    sorter = TopologicalSorter(read)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = map(repr, reversed(error.args[1]))
        raise ConfigError(f"`inputs` form a cycle: {' reads '.join(cycle)}") from error
    names, order = list(read), list[str]()
    positions = {name: position for position, name in enumerate(names)}
    ready: list[int] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, positions[name])
        order.append(names[heapq.heappop(ready)])
        sorter.done(order[-1])
    return order


DRIVER = "driver"
"""The driver's name; no stage can have it."""


@dataclass(frozen=True)
class Member:
    """One worker: a replica of a stage."""

    stage: str
    stage_index: int
    replica: int = 0
    num_replicas: int = 1

    @property
    def name(self) -> str:
        return member_name(self.stage, self.replica)

    @property
    def label(self) -> str:
        """Its name for people: a stage's only replica has the stage's name."""
        return self.stage if self.num_replicas == 1 else self.name


def member_name(stage_name: str, replica: int = 0) -> str:
    return f"{stage_name}:{replica}"


def member_names(workers: Iterable[Member]) -> list[str]:
    """Return the names of all members of the group, by rank."""
    return [*(worker.name for worker in workers), DRIVER]


@functools.cache  # it is called for every bundle, and a job has few numbers of micro-batches
def cut_into_bundles(
    num_microbatches: int, per_message: int, in_turns: bool = False
) -> tuple[range, ...]:
    """Return the micro-batches of each bundle of a mini-batch: of each message between stages.

        22 micro-batches, at most 6 per message:    1 3 5 5 4 3 1    in turns:  6 6 5 5

    The next stage can start when the first bundle is done, and all stages wait for the last one's
    gradients, so these are small, and the pipeline fills and drains as with single micro-batches.
    Three times as large, one is there when the next stage has done the three actions of the one
    before. Twice as large would be faster if messages cost nothing.

    Args:
        per_message: the most micro-batches of a bundle.
        in_turns: whether replicas take turns, so that bundles have to be equal.
    """
    rising: list[int] = []
    size = 1
    while not in_turns and size < per_message and num_microbatches >= 2 * sum(rising) + 3 * size:
        rising.append(size)
        size *= 3
    left = num_microbatches - 2 * sum(rising)
    smaller, larger = divmod(left, count := -(-left // per_message))
    level = [smaller + (number < larger) for number in range(count)]
    ends = list(itertools.accumulate([*rising, *level, *reversed(rising)]))
    return tuple(range(start, end) for start, end in itertools.pairwise([0, *ends]))


class ReplicaAssignment:
    """Assigns bundles to the replicas of one stage.

    Args:
        shares: for each replica, its number of any `sum(shares)` consecutive bundles.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.num_replicas = len(shares)
        divisor = math.gcd(*shares)
        self._shares = [share // divisor for share in shares]
        self._numbers: dict[tuple[int, int], list[int]] = {}

    def owner(self, bundle: int) -> int:
        """Return the replica that computes the bundle of this number in the round."""
        return self._cycle[bundle % len(self._cycle)]

    def numbers(self, replica: int, num_bundles: int) -> list[int]:
        """Return the bundles of a round that a replica computes, in order; there may be none."""
        numbers = self._numbers.get((replica, num_bundles))
        if numbers is None:  # it is called for every bundle, and a job has few numbers of bundles
            numbers = [bundle for bundle in range(num_bundles) if self.owner(bundle) == replica]
            self._numbers[replica, num_bundles] = numbers
        return numbers

    def largest_part(self, num_bundles: int) -> int:
        """Return how many bundles of a round the replica with the most bundles computes."""
        return max(len(self.numbers(r, num_bundles)) for r in range(self.num_replicas))

    @functools.cached_property
    def _cycle(self) -> list[int]:
        total, owners = sum(self._shares), []
        gained = [0] * self.num_replicas
        for _ in range(total):
            gained = [have + share for have, share in zip(gained, self._shares, strict=True)]
            richest = max(range(self.num_replicas), key=gained.__getitem__)
            gained[richest] -= total
            owners.append(richest)
        return owners


class ReplicaShare(NamedTuple):
    """One replica's part of every round."""

    turns: ReplicaAssignment
    replica: int

    def numbers(self, num_bundles: int) -> list[int]:
        """Return the bundles that the replica computes in a round, in order."""
        return self.turns.numbers(self.replica, num_bundles)


def shares_by_speed(seconds: Sequence[float], num_bundles: int) -> list[int]:
    """Return the shares with which replicas of unequal speed finish a round soonest.

    Each bundle goes to the replica that would finish it first; on a tie, to the first of these.

    Args:
        seconds: per bundle, for each replica.
    """
    shares = [0] * len(seconds)
    for _ in range(max(num_bundles, len(seconds))):
        ends = [(share + 1) * each for share, each in zip(shares, seconds, strict=True)]
        shares[ends.index(min(ends))] += 1
    return [max(1, share) for share in shares]
