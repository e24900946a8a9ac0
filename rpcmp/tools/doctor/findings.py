"""One thing that was looked at, and whether it is as it should be.

Which ways between processes a job uses, and what for. Pure.

What was seen of the processes of a job and of the ways between them, before it is judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rpcmp.config.sections import StageConfig
from rpcmp.config.topology import DRIVER, Graph, Member
from rpcmp.errors import RpcmpError
from rpcmp.net.link_test import LinkSpeed
from rpcmp.server.host_facts import HostFacts


class Status(StrEnum):
    """How it is."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One check of one process.

    Attributes:
        where: the stage, the driver, or "a - b" for the way between two.
        check: what was looked at, one word.
        status: how it is.
        text: what was found, and what to do about it.
        is_temporary: whether it may be better without anybody doing anything.
    """

    where: str
    check: str
    status: Status
    text: str
    is_temporary: bool = False


def exit_code(findings: Iterable[Finding]) -> int:
    """0: a run may begin; 75: a server is away or busy, and nothing else is wrong; 1: it is."""
    failed = [finding for finding in findings if finding.status is Status.FAILED]
    if not failed:
        return 0
    return 75 if all(finding.is_temporary for finding in failed) else 1


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


@dataclass(frozen=True)
class HostReport:
    """One stage, a spare, or the driver.

    Attributes:
        name: the stage's, "spare HOST:PORT", or the driver's.
        settings: of the stage; defaults for the others.
        address: HOST:PORT of its server; empty: the driver has none.
        facts: None where nobody could say.
        way: to it, from the driver; None for the driver itself, and where there is none.
        error: why something is missing.
    """

    name: str
    settings: StageConfig
    address: str = ""
    facts: HostFacts | None = None
    way: LinkSpeed | None = None
    error: RpcmpError | None = None


@dataclass(frozen=True)
class SeenLink:
    """A link that the job uses.

    Attributes:
        link: which.
        way: as measured from its first end; None: both ends are in one network, so that nothing
            has to be carried, or there is none.
        error: why one end cannot reach the other.
    """

    link: Link
    way: LinkSpeed | None = None
    error: RpcmpError | None = None
