"""Interleaved rounds: each round runs every contestant once, each round beginning with another."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rpcmp.bench.contestant import Contestant, Segment
from rpcmp.errors import MismatchError, UnfitError

WARMUP_STEPS = 5
"""Steps of each contestant before the first round: first touch of memory, connections, caches."""

WARMUP_SHARE = 1 / 6
"""Of the budget; a warm-up that would take longer is of one step."""

MIN_STEPS = 5
"""Of a round, where their number is not given and the budget is large enough."""

MIN_PAIRS = 5
"""Rounds that are run whatever they take: fewer tell nothing."""

ROUND_SECONDS = 2.0
"""What everybody's part of a round should take, or more: what is cold after a pause, and the first
step's start, then weigh little."""

LOSS_TOLERANCE = 1e-4
"""Relative. Sums over samples are taken in another order by each contestant."""

Progress = Callable[[str, float], None]
"""Told what is measured now, and for how many seconds that and the rest will go on."""

Item = TypeVar("Item")


class StoppedError(Exception):
    """Somebody wants what there is so far."""


async def unless(stop: asyncio.Event | None, work: Awaitable[Item]) -> Item:
    """What `work` gives, which is ended at once when `stop` is set.

    Raises:
        StoppedError: it was.
    """
    if stop is None:
        return await work
    running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise StoppedError
        return await running
    finally:
        stopping.cancel()
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


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

    def cut(self, rounds: int, steps: int) -> None:
        """Leave out what others have not done."""
        del self.seconds[rounds:], self.driver_cpu_seconds[rounds:], self.losses[steps:]


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
    contestants: Sequence[Contestant],
    pairs: int,
    steps: int | None,
    progress: Progress,
    budget: float = math.inf,
    stop: asyncio.Event | None = None,
) -> Rounds:
    """Run `pairs` rounds of `steps` steps.

    Args:
        pairs: as many as the budget allows, and at least MIN_PAIRS.
        steps: None for as many as take the fastest ROUND_SECONDS, or as the budget allows.
        progress: told how far it is.
        budget: seconds that warm-up and rounds may take together.
        stop: set by somebody else, ends them with what there is.

    Raises:
        RpcmpError: a contestant failed.
        StoppedError: there is nothing yet.
    """
    unfit: dict[str, str] = {}
    async with _started(contestants, unfit, progress, budget, stop) as fit:
        series = {one.name: Series(one.name, one.settings) for one in fit}
        begin = time.monotonic()
        seconds = await _warm_up(fit, series, progress, budget, stop)
        whole = sum(seconds.values())
        count = steps or _steps(min(seconds.values()), whole * pairs, budget * (1 - WARMUP_SHARE))
        with contextlib.suppress(StoppedError):
            for number in range(1, pairs + 1):
                left = whole * count * (pairs + 1 - number)
                over = time.monotonic() - begin + whole * count > budget
                if over and number > MIN_PAIRS:
                    break
                for one in rotated(fit, number):
                    progress(f"round {number} of {pairs}: {one.name}", left)
                    segment = await unless(stop, one.run(count))
                    series[one.name].add(segment, is_warmup=False)
                    left -= seconds[one.name] * count
    every = list(series.values())
    rounds = min((len(one.seconds) for one in every), default=0)
    if every and not rounds:
        raise StoppedError
    for one_series in every:
        one_series.cut(rounds, min(len(one.losses) for one in every))
    return Rounds(every, count, unfit)


async def _warm_up(
    fit: Sequence[Contestant],
    series: Mapping[str, Series],
    progress: Progress,
    budget: float,
    stop: asyncio.Event | None,
) -> dict[str, float]:
    """The first steps of all, the same for each; how long a step of each takes."""
    seconds: dict[str, float] = {}
    for steps in (1, WARMUP_STEPS - 1):
        if steps > 1 and sum(seconds.values()) * steps > budget * WARMUP_SHARE:
            break
        for one in fit:
            progress(f"warm-up: {one.name}", budget)
            segment = await unless(stop, one.run(steps))
            series[one.name].add(segment, is_warmup=True)
            seconds[one.name] = segment.seconds_per_step
    return seconds or {"": math.inf}


def _steps(fastest: float, whole: float, budget: float) -> int:
    """Of each contestant in each round.

    Args:
        fastest: seconds of a step of the fastest.
        whole: seconds of a step of all, as often as there are rounds.
        budget: seconds that all may take.
    """
    wanted = max(MIN_STEPS, round(ROUND_SECONDS / fastest))
    return wanted if whole * wanted <= budget else max(1, int(budget / whole))


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
    contestants: Sequence[Contestant],
    unfit: dict[str, str],
    progress: Progress,
    budget: float,
    stop: asyncio.Event | None,
) -> AsyncIterator[list[Contestant]]:
    """Those who can take part, one started after the other, since starting measures as well."""
    fit: list[Contestant] = []
    async with contextlib.AsyncExitStack() as stack:
        for number, one in enumerate(contestants, 1):
            progress(f"starting {one.name} ({number} of {len(contestants)})", budget)
            stack.push_async_callback(one.close)
            try:
                await unless(stop, one.start())
            except UnfitError as error:
                unfit[one.name] = str(error)
                await one.close()
            else:
                fit.append(one)
        yield fit
