"""Links between the processes of a job, listeners, and connections. Pure.

    driver ──dials──> every server                control, batches; tensors come back the same way
    every other server ──dials──> the first       rendezvous
    two servers of different networks <──> each other      tensors between their workers
    a server ──dials──> one of another machine    to copy the snapshots of its stage

On one machine a server opens its neighbour's snapshots in memory, and workers that were forked by
one process reach each other by a loopback of their own: neither needs a connection.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpcmp.checkpoint.slots import mirrors_of
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER

TENSORS = frozenset({"batches", "activations", "gradients", "snapshots"})
"""Those contents of links that consist of tensors."""

FREE_PORT = "127.0.0.1, a free port"


@dataclass(frozen=True)
class Link:
    """Two processes that talk to each other.

    Attributes:
        one, other: labels of workers; the driver comes first.
        carries: contents, such as "activations".
    """

    one: str
    other: str
    carries: tuple[str, ...]

    @property
    def has_tensors(self) -> bool:
        """Whether its bandwidth matters."""
        return bool(TENSORS.intersection(self.carries))


def job_links(
    config: Config, holders: Sequence[int | None], tied: Sequence[Sequence[str]] = ()
) -> list[Link]:
    """Return every link of a job, each once.

    Args:
        holders: for each worker, the index of the one whose server holds its snapshots as well.
        tied: groups of stages that share a parameter, its owner first.
    """
    graph, workers = config.graph(), config.workers
    sends_batches = config.data is None or config.data.at == "driver"
    carried: dict[tuple[str, str], list[str]] = {}

    def add(one: str, other: str, what: str) -> None:
        pair = (one, other) if (other, one) not in carried else (other, one)
        if what not in carried.setdefault(pair, []):
            carried[pair].append(what)

    labels = [worker.label for worker in workers]
    replicas = {name: [w.label for w in workers if w.stage == name] for name in graph.stages}
    for worker in workers:
        reads_batches = sends_batches and graph.parts(worker.stage)
        add(DRIVER, worker.label, "batches" if reads_batches else "control")
    for name in graph.stages:
        for port in graph.ports(name):
            for one, other in itertools.product(replicas[name], replicas[port.reader]):
                add(one, other, "activations")
    for stage_labels in replicas.values():
        for one, other in itertools.combinations(stage_labels, 2):
            add(one, other, "gradients")
    for owner, *others in tied:  # the first replica sends and receives for its stage
        for stage in others:
            for one, other in itertools.product(replicas[owner], replicas[stage]):
                if one == replicas[owner][0] or other == replicas[stage][0]:
                    add(one, other, "gradients")
    for label, holder in zip(labels, holders, strict=True):
        if holder is not None:
            add(label, labels[holder], "snapshots")
    for label in labels[1:]:
        add(labels[0], label, "rendezvous")
    return [Link(*pair, tuple(carries)) for pair, carries in carried.items()]


@dataclass(frozen=True)
class Whereabouts:
    """Place of a worker and its server, or of the driver.

    Attributes:
        address: HOST:PORT of the server; empty for the driver, and if the server is started here.
        machine: equal for all that share a kernel.
        network: equal for workers that reach each other by loopback.
        exposed: why other users of the host reach the worker; empty: they do not; None: only the
            host can tell.
    """

    address: str
    host: str
    machine: str
    network: str
    exposed: str | None


@dataclass(frozen=True)
class Listener:
    """A port at which a server listens.

    Attributes:
        address: HOST:PORT; None: a free port of the loopback.
        admits: the peers that may connect.
        exposed: see Whereabouts.
    """

    stage: str
    address: str | None
    host: str
    admits: str
    exposed: str | None


@dataclass(frozen=True)
class StageLink(Link):
    """A link with the connections that it needs.

    Attributes:
        dials: (client, server) of every connection; empty if the two reach each other by a
            loopback of their own, or in memory.
        crosses_hosts: whether the link leaves a machine.
        is_encrypted: by TLS 1.3.
    """

    dials: tuple[tuple[str, str], ...]
    crosses_hosts: bool
    is_encrypted: bool


def job_listeners(config: Config, places: Mapping[str, Whereabouts]) -> list[Listener]:
    """Return every port that the job uses; the driver has none."""
    return [
        Listener(
            worker.label,
            place.address or None,
            place.host,
            _admits(config, is_local=not place.address),
            place.exposed,
        )
        for worker in config.workers
        for place in [places[worker.label]]
    ]


def _admits(config: Config, is_local: bool) -> str:
    if is_local:
        return "you and root, on this machine"
    if config.certs_folder is not None:
        return "who has a certificate of the authority, by TLS 1.3"
    if config.security.insecure:
        return "anybody who reaches the port: no certificates"
    return "who serves it and root, on that machine"


def stage_links(
    config: Config, places: Mapping[str, Whereabouts], tied: Sequence[Sequence[str]] = ()
) -> list[StageLink]:
    """Return every link of a job with the connections that it needs.

    Args:
        places: by worker's label; includes the driver's.
        tied: groups of stages that share a parameter, its owner first.
    """
    labels = [worker.label for worker in config.workers]
    holders = mirrors_of(config, [places[label].machine for label in labels])
    copies = {(labels[at], labels[i]) for i, at in enumerate(holders) if at is not None}
    return [
        StageLink(
            link.one,
            link.other,
            link.carries,
            tuple(_dials(link, one, other, labels[0], copies)),
            crosses_hosts=one.machine != other.machine,
            is_encrypted=bool(one.address or other.address) and config.certs_folder is not None,
        )
        for link in job_links(config, holders, tied)
        for one, other in [(places[link.one], places[link.other])]
    ]


def _dials(
    link: Link, one: Whereabouts, other: Whereabouts, first: str, copies: set[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return (client, server) of each connection; `copies` has (holder, owner) of snapshots."""
    there, back = (link.one, link.other), (link.other, link.one)
    if link.one == DRIVER:
        return [there]
    has_tensors = bool(TENSORS.intersection(link.carries) - {"snapshots"})
    dials = []
    for pair in (there, back):
        sends = has_tensors and one.network != other.network
        fetches = pair in copies and one.machine != other.machine
        if sends or fetches or ("rendezvous" in link.carries and pair[1] == first):
            dials.append(pair)
    return dials
