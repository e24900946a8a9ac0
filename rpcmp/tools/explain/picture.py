"""The schedule of one step as text: a row a stage, time to the right. Pure.

    0 stage0  F0 F1 F2       B0 F3 B1
    1 stage1     F0 F1    B0 F2 B1 F3
    2 stage2        F0 B0 F1 B1 F2 B2

Columns are moments: an action begins in the column of its start and has room until that of its end,
so what stands below each other happens at the same time. Where actions are too short to be written
out to scale time is stretched there, for all rows alike.

Who listens where, who dials whom, and what passes. Pure.

    driver ──dials──> every server                control, batches; tensors come back the same way
    every other server ──dials──> the first       rendezvous
    two servers of different networks <──> each other      tensors between their workers
    a server ──dials──> one of another machine    whose snapshots it holds as well

On one machine a server opens its neighbour's snapshots in memory, and workers that were forked by
one process reach each other by a loopback that is theirs alone: nothing of that is dialled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.job.restore_point import mirrors_of
from rpcmp.pipelining.simulation import SimulatedRun
from rpcmp.tools.doctor.findings import TENSORS, Link, links

LONGEST = 8
"""Blocks of rows that a picture has at most; JSON has all of it."""


def picture(
    runs: Mapping[str, Sequence[SimulatedRun]], names: Sequence[str], width: int
) -> list[str]:
    """The rows, in blocks one below the other where a step is wider than `width`.

    Args:
        runs: what each stage does, in order.
        names: of the stages, in the config's order, which their numbers are of.
        width: characters of a line.
    """
    heads = [f"{index} {name}" for index, name in enumerate(names)]
    indent = max(map(len, heads)) + 2
    room = max(20, width - indent)
    columns = _columns(runs, room)
    blocks = list(_blocks([_row(runs[name], columns) for name in names], room))
    lines: list[str] = []
    for rows in blocks[:LONGEST]:
        lines += [""] if lines else []
        pairs = zip(heads, rows, strict=True)
        lines += [f"{head:{indent}}{row}".rstrip() for head, row in pairs]
    if len(blocks) > LONGEST:
        lines += ["", f"... and {len(blocks) - LONGEST} such blocks more, which --json has"]
    return lines


def label(run: SimulatedRun) -> str:
    """An action in its stage's row, "F0"."""
    return f"{run.action}{run.microbatch}"


def actions(
    runs: Mapping[str, Sequence[SimulatedRun]], names: Sequence[str]
) -> dict[str, list[str]]:
    """What each stage does, in order, each action with its stage's number: "2F0"."""
    return {
        name: [f"{index}{label(run)}" for run in runs[name]] for index, name in enumerate(names)
    }


def _blocks(rows: list[str], room: int) -> Iterator[list[str]]:
    """The rows in pieces of at most `room` columns that end within no row's action."""
    length = max(map(len, rows), default=0)
    begin = 0
    while begin < length:
        ends = range(min(begin + room, length), begin, -1)
        whole = (end for end in ends if not any(_cuts(row, end) for row in rows))
        end = next(whole, ends[0])
        yield [row[begin:end] for row in rows]
        begin = end


def _cuts(row: str, end: int) -> bool:
    """Whether what ends there has only a part of an action."""
    return not row[end - 1 : end].isspace() and bool(row[end : end + 1].strip())


def _row(runs: Sequence[SimulatedRun], columns: Mapping[int, int]) -> str:
    row = ""
    for run in runs:
        row = (row and f"{row} ").ljust(columns[_ns(run.start)]) + label(run)
    return row


def _columns(runs: Mapping[str, Sequence[SimulatedRun]], room: int) -> dict[int, int]:
    """The column of each moment: to scale, but for what would be too narrow for its actions.

    Scaled so that a step fills a line, where it needs no more than that.
    """
    narrowest = _stretched(runs, 0.0)
    last = max(narrowest, default=0)
    left = room - narrowest.get(last, 0)
    return _stretched(runs, left / last) if last and left > 0 else narrowest


def _stretched(runs: Mapping[str, Sequence[SimulatedRun]], scale: float) -> dict[int, int]:
    """The column of each moment, `scale` columns a nanosecond where there is room for that."""
    every = [run for done in runs.values() for run in done]
    moments = sorted({moment for run in every for moment in (_ns(run.start), _ns(run.end))})
    ending: dict[int, list[SimulatedRun]] = {}
    for run in every:
        ending.setdefault(_ns(run.end), []).append(run)
    columns: dict[int, int] = {}
    before, column = 0, 0.0
    for moment in moments:
        column += (moment - before) * scale
        needed = [
            columns[_ns(run.start)] + len(label(run)) + 1
            for run in ending.get(moment, ())
            if _ns(run.start) < moment
        ]
        column = max(column, *needed) if needed else column
        columns[moment] = int(column)
        before = moment
    return columns


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


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
class StageLink:
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
) -> list[StageLink]:
    """Everybody who talks to somebody.

    Args:
        config: the job.
        places: by worker's label, and the driver's.
        tied: stages that have a parameter in common, its owner first.
    """
    workers, data = config.workers, config.data
    labels = [worker.label for worker in workers]
    held_by = mirrors_of(config, [places[label].machine for label in labels])
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
) -> StageLink:
    here, there = places[link.one], places[link.other]
    crosses = here.machine != there.machine
    is_served = bool(here.address or there.address)
    return StageLink(
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
