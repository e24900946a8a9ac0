"""One case from begin to end: the bound, the rounds, the check that all train the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rpcmp.bench import rounds
from rpcmp.bench.bound import Bound
from rpcmp.bench.cases import Case
from rpcmp.bench.contestant import Contestant
from rpcmp.bench.peers.group import stage_times
from rpcmp.bench.rounds import Progress, Series
from rpcmp.errors import UnfitError


@dataclass(frozen=True)
class Result:
    """What was measured.

    Attributes:
        pairs, steps: rounds, and steps of each contestant in each round.
        bound_s: seconds of a step without a bubble; None where the stages are no chain.
        ours: the first contestant's series.
        peers: the others'.
        notes: what the reader of the figures has to know.
    """

    case: Case
    pairs: int
    steps: int
    bound_s: float | None
    ours: Series
    peers: list[Series]
    notes: list[str]


async def benchmark(
    case: Case,
    contestants: Sequence[Contestant],
    pairs: int,
    steps: int | None,
    bound: Bound,
    progress: Progress,
    budget: float = math.inf,
    stop: asyncio.Event | None = None,
) -> Result:
    """Measure a case.

    Args:
        contestants: ours first; none has been started.
        pairs, steps: see `rounds.compare`.
        bound: the schedule's ideal step.
        progress: told what happens.
        budget, stop: see `rounds.compare`.

    Raises:
        StoppedError: somebody stopped it before there was anything.
        MismatchError: losses differ in a frozen case.
        UnfitError: ours cannot run it.
        RpcmpError: a contestant failed.
    """
    notes = list(case.notes)
    bound_s = await rounds.unless(
        stop, _bound(case, bound, notes, lambda what: progress(what, budget))
    )
    done = await rounds.compare(contestants, pairs, steps, progress, budget, stop)
    notes += [f"without {name}: {why}" for name, why in done.unfit.items()]
    own_name = contestants[0].name
    if own_name in done.unfit:
        raise UnfitError(f"{own_name}: {done.unfit[own_name]}")
    if case.is_frozen:
        rounds.require_equal_losses(done.series)
    elif difference := rounds.loss_difference(done.series):
        notes.append(f"losses differ (does the model draw random numbers?): {difference}")
    ours, *peers = done.series
    return Result(case, len(ours.seconds), done.steps, bound_s, ours, peers, notes)


async def _bound(
    case: Case, bound: Bound, notes: list[str], progress: Callable[[str], None]
) -> float | None:
    progress("stage times")
    try:
        return bound(await stage_times(case), case.config.num_microbatches)
    except UnfitError as error:
        notes.append(f"without a bound: {error}")
        return None
