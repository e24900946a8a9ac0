"""One case from begin to end: the bound, the rounds, the check that all train the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rpcmp.bench import rounds
from rpcmp.bench.bound import Bound
from rpcmp.bench.cases import Case
from rpcmp.bench.contestant import Contestant
from rpcmp.bench.limits import Limits
from rpcmp.bench.peers.group import stage_times
from rpcmp.bench.rounds import Progress, Series
from rpcmp.bench.statistics import estimate, is_telling
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
    limits: Limits | None = None,
) -> Result:
    """Measure a case.

    Args:
        contestants: ours first; none has been started.
        pairs, steps: see `rounds.compare`.
        bound: the schedule's ideal step.
        progress: called before each measurement.
        limits: see `rounds.compare`.

    Raises:
        StoppedError: the user stopped it before there was anything.
        MismatchError: losses differ in a frozen case.
        UnfitError: ours cannot run it.
        RpcmpError: a contestant failed.
    """
    notes = list(case.notes)
    limits = limits or Limits()
    progress("stage times", limits.left)
    bound_s = await limits.run(_bound(case, bound, notes), is_needed=True)
    done = await rounds.compare(contestants, pairs, steps, progress, limits)
    notes += [f"without {name}: {why}" for name, why in done.unfit.items()]
    own_name = contestants[0].name
    if own_name in done.unfit:
        raise UnfitError(f"{own_name}: {done.unfit[own_name]}")
    if case.is_frozen:
        rounds.require_equal_losses(done.series)
    elif difference := rounds.loss_difference(done.series):
        notes.append(f"losses differ (does the model draw random numbers?): {difference}")
    ours, *peers = done.series
    notes += _doubts(len(ours.seconds), limits)
    return Result(case, len(ours.seconds), done.steps, bound_s, ours, peers, notes)


def _doubts(pairs: int, limits: Limits) -> Iterator[str]:
    """What keeps the result from being sure."""
    if limits.is_stopped:
        yield "stopped: this is what there was until then"
    if not is_telling(estimate([1.0] * pairs)):
        yield (
            f"{pairs} round{'s are' if pairs > 1 else ' is'} too few to tell contestants apart: "
            "more --pairs, or a larger --budget, could"
        )


async def _bound(case: Case, bound: Bound, notes: list[str]) -> float | None:
    try:
        return bound(await stage_times(case), case.config.num_microbatches)
    except UnfitError as error:
        notes.append(f"without a bound: {error}")
        return None
