"""From where a generation goes on: decided from what the servers hold. Pure.

Every stage has its last snapshots in its own server's memory, and its neighbour has them as well.
The group goes on from the newest step that every stage can be brought to; see `snapshot.slots` for
why there is one while no more than one host is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Holdings:
    """The snapshots that one stage's server holds.

    Attributes:
        own: the steps of its own stage.
        mirrored: the steps of another stage, by that stage's name.
    """

    own: Collection[int] = ()
    mirrored: Mapping[str, Collection[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class InMemory:
    """A step that every stage can go on from.

    Attributes:
        step: which one.
        holders: by stage, the one whose server has to be asked for it; itself where it is at hand.
    """

    step: int
    holders: dict[str, str]


def newest_common(
    stages: Sequence[str], holdings: Mapping[str, Holdings], known: Collection[int]
) -> InMemory | None:
    """The newest step of which every stage's snapshot is somewhere in memory.

    Args:
        stages: names of all.
        holdings: what each one's server holds.
        known: the steps of which the driver knows what it was itself.
    """
    places = {stage: _places(stage, holdings) for stage in stages}
    common = set(known).intersection(*places.values())
    if not common:
        return None
    step = max(common)
    return InMemory(step, {stage: places[stage][step] for stage in stages})


def neighbours(machines: Sequence[str]) -> list[int | None]:
    """Which stage's server holds the snapshots of each stage as well: the next one of another
    machine, or else the next one; None where there is only one stage.

    Every server holds those of at most one other stage. On machines in turn (a, b, a, b) the next
    stage is elsewhere anyway; where neighbouring stages share one, all are shifted by as many.

    Args:
        machines: of each stage's server.
    """
    count = len(machines)
    if count < 2:
        return [None] * count

    def together(shift: int) -> int:
        return sum(machines[i] == machines[(i + shift) % count] for i in range(count))

    shift = min(range(1, count), key=together)
    return [(index + shift) % count for index in range(count)]


def _places(stage: str, holdings: Mapping[str, Holdings]) -> dict[int, str]:
    """Who has a stage's snapshots, by step: its own server rather than another's."""
    others = {
        step: name
        for name, held in holdings.items()
        for step in held.mirrored.get(stage, ())
        if name != stage
    }
    return others | dict.fromkeys(holdings[stage].own, stage)
