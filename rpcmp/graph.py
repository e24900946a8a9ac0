"""Which stage reads what: a directed acyclic graph of stages.

        input ──> image ──────┐
          │                   v
          └─────> profile ─> classifier ──> loss
          └──────────────────^

Stages name what they read: another stage ("image"), a part of its output ("image.features"), the
batch's inputs ("input", "input.profile") or targets ("target"). The graph has one sink, the stage
that nobody reads; the driver asks it for the loss. Pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rpcmp.errors import ConfigError
from rpcmp.suggestion import did_you_mean, nearest

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


def chain(names: Sequence[str]) -> Graph:
    """The graph of stages that each read the one before."""
    sources = ["input", *names[:-1]]
    return Graph({name: (Reference(source),) for name, source in zip(names, sources, strict=True)})


def build(inputs: Mapping[str, Sequence[str]]) -> Graph:
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
