"""Who listens where, who dials whom, and what passes. Pure.

    driver ──dials──> every server                control, batches; tensors come back the same way
    every other server ──dials──> the first       rendezvous
    two servers of different networks <──> each other      tensors between their workers
    a server ──dials──> one of another machine    whose snapshots it holds as well

On one machine a server opens its neighbour's snapshots in memory, and workers that were forked by
one process reach each other by a loopback that is theirs alone: nothing of that is dialled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpcmp.config import Config
from rpcmp.doctor.links import TENSORS, Link, links
from rpcmp.job.restore import holders
from rpcmp.members import DRIVER

FREE_PORT = "127.0.0.1, a free port"


@dataclass(frozen=True)
class Whereabouts:
    """Where a worker and its server are, or the driver.

    Attributes:
        address: HOST:PORT of the server; empty: it is started here, or it is the driver.
        host: the host's name.
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
    """Where a server listens.

    Attributes:
        stage: the worker's label.
        address: HOST:PORT; None: a free port of the loopback.
        host: the host's name.
        admits: who is let in.
        exposed: see Whereabouts.
    """

    stage: str
    address: str | None
    host: str
    admits: str
    exposed: str | None


@dataclass(frozen=True)
class Way:
    """Two who talk to each other.

    Attributes:
        one, other: labels of workers, or the driver's name, which is always the first.
        carries: what passes between them.
        dials: who opens connections to whose port, as pairs; none: they reach each other by a
            loopback of their own, or in memory.
        crosses_hosts: whether it leaves a machine.
        is_encrypted: by TLS 1.3.
    """

    one: str
    other: str
    carries: tuple[str, ...]
    dials: tuple[tuple[str, str], ...]
    crosses_hosts: bool
    is_encrypted: bool


def listeners(config: Config, places: Mapping[str, Whereabouts]) -> list[Listener]:
    """Every port that the job uses; the driver has none.

    Args:
        config: the job.
        places: by worker's label, and the driver's.
    """
    found = []
    for worker in config.workers:
        place = places[worker.label]
        is_ours = not place.address
        found.append(
            Listener(
                worker.label,
                place.address or None,
                place.host,
                _admits(config, is_ours),
                place.exposed,
            )
        )
    return found


def ways(
    config: Config, places: Mapping[str, Whereabouts], tied: Sequence[Sequence[str]] = ()
) -> list[Way]:
    """Everybody who talks to somebody.

    Args:
        config: the job.
        places: by worker's label, and the driver's.
        tied: stages that have a parameter in common, its owner first.
    """
    workers, data = config.workers, config.data
    labels = [worker.label for worker in workers]
    held_by = holders(config, [places[label].machine for label in labels])
    held = {(labels[holder], labels[i]) for i, holder in enumerate(held_by) if holder is not None}
    sends_batches = data is None or data.at == "driver"
    used = links(config.graph(), workers, held_by, sends_batches, tied)
    return [_way(config, link, places, labels[0], held) for link in used]


def _way(
    config: Config,
    link: Link,
    places: Mapping[str, Whereabouts],
    first: str,
    held: set[tuple[str, str]],
) -> Way:
    here, there = places[link.one], places[link.other]
    crosses = here.machine != there.machine
    is_served = bool(here.address or there.address)
    return Way(
        link.one,
        link.other,
        link.carries,
        tuple(_dials(link, here, there, first, held)),
        crosses,
        is_encrypted=is_served and config.certs_folder is not None,
    )


def _dials(
    link: Link, one: Whereabouts, other: Whereabouts, first: str, held: set[tuple[str, str]]
) -> list[tuple[str, str]]:
    there, back = (link.one, link.other), (link.other, link.one)
    if link.one == DRIVER:
        return [there]
    tensors = TENSORS.intersection(link.carries) - {"snapshots"}
    found = []
    for pair in (there, back):
        carries = bool(tensors) and one.network != other.network
        copies = pair in held and one.machine != other.machine
        if carries or copies or ("rendezvous" in link.carries and pair[1] == first):
            found.append(pair)
    return found


def _admits(config: Config, is_ours: bool) -> str:
    if is_ours:
        return "you and root, on this machine"
    if config.certs_folder is not None:
        return "who has a certificate of the authority, by TLS 1.3"
    if config.security.insecure:
        return "anybody who reaches the port: no certificates"
    return "who serves it and root, on that machine"
