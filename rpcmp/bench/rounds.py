"""Interleaved rounds: each round runs every contestant once, each round beginning with another."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rpcmp.bench.contestant import Contestant, Segment
from rpcmp.errors import MismatchError, UnfitError

WARMUP_STEPS = 5
"""Steps of each contestant before the first round: first touch of memory, connections, caches."""

MIN_STEPS = 5
"""Of a round, where their number is not given."""

ROUND_SECONDS = 2.0
"""What everybody's part of a round should take, or more: what is cold after a pause, and the first
step's start, then weigh little."""

LOSS_TOLERANCE = 1e-4
"""Relative. Sums over samples are taken in another order by each contestant."""

Progress = Callable[[str], None]

Item = TypeVar("Item")


@dataclass(frozen=True)
class Series:
    """What one contestant did.

    Attributes:
        seconds: of a step, in each round.
        losses: of every step, warm-up included.
        driver_cpu_seconds: of a step, in each round, where a process drives the others.
    """

    name: str
    settings: Mapping[str, str | int]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    driver_cpu_seconds: list[float] = field(default_factory=list)

    def add(self, segment: Segment, is_warmup: bool) -> None:
        """Note a segment; a warm-up's time does not count, its losses do."""
        self.losses.extend(segment.losses)
        if not is_warmup:
            self.seconds.append(segment.seconds_per_step)
            if segment.driver_cpu_seconds is not None:
                self.driver_cpu_seconds.append(segment.driver_cpu_seconds)


@dataclass(frozen=True)
class Rounds:
    """What was measured.

    Attributes:
        series: everybody's.
        steps: of each in each round.
        unfit: for those who could not take part, why.
    """

    series: list[Series]
    steps: int
    unfit: dict[str, str]


async def compare(
    contestants: Sequence[Contestant], pairs: int, steps: int | None, progress: Progress
) -> Rounds:
    """Run `pairs` rounds of `steps` steps.

    Args:
        steps: None for as many as take the fastest ROUND_SECONDS, and at least MIN_STEPS.

    Raises:
        RpcmpError: a contestant failed.
    """
    unfit: dict[str, str] = {}
    async with _started(contestants, unfit, progress) as fit:
        series = {one.name: Series(one.name, one.settings) for one in fit}
        fastest = math.inf
        progress("warm-up")
        for one in fit:
            segment = await one.run(WARMUP_STEPS)
            series[one.name].add(segment, is_warmup=True)
            fastest = min(fastest, segment.seconds_per_step)
        count = steps or max(MIN_STEPS, round(ROUND_SECONDS / fastest))
        for number in range(1, pairs + 1):
            progress(f"round {number} of {pairs}")
            for one in rotated(fit, number):
                series[one.name].add(await one.run(count), is_warmup=False)
    return Rounds(list(series.values()), count, unfit)


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """The order of round `number`."""
    start = number % len(items) if items else 0
    return [*items[start:], *items[:start]]


def loss_difference(series: Sequence[Series]) -> str | None:
    """Where the first contestant's losses and another's part, or None."""
    first = series[0]
    for other in series[1:]:
        pairs = zip(first.losses, other.losses, strict=True)
        for step, (mine, theirs) in enumerate(pairs, start=1):
            if not math.isclose(mine, theirs, rel_tol=LOSS_TOLERANCE):
                return f"step {step}: loss {mine} of {first.name}, {theirs} of {other.name}"
    return None


def require_equal_losses(series: Sequence[Series]) -> None:
    """Who trains something else is not comparable.

    Raises:
        MismatchError: the first difference.
    """
    if difference := loss_difference(series):
        raise MismatchError(f"the contestants do not train the same: {difference}")


@contextlib.asynccontextmanager
async def _started(
    contestants: Sequence[Contestant], unfit: dict[str, str], progress: Progress
) -> AsyncIterator[list[Contestant]]:
    """Those who can take part, one started after the other, since starting measures as well."""
    fit: list[Contestant] = []
    async with contextlib.AsyncExitStack() as stack:
        for one in contestants:
            progress(f"starting {one.name}")
            stack.push_async_callback(one.close)
            try:
                await one.start()
            except UnfitError as error:
                unfit[one.name] = str(error)
                await one.close()
            else:
                fit.append(one)
        yield fit
