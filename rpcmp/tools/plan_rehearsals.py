"""Train a few steps of the best plans: which of them is the fastest, no prediction can tell.

The steps leave nothing behind, take what a run will take, and teach what messages and snapshots
cost in other plans. The best two are trained twice if they are nearly equal, since the best of
several was lucky as well.
"""

from __future__ import annotations

import contextlib
import time

from rpcmp.errors import NonFiniteLossError, RpcmpError, one_line
from rpcmp.job.segments import rehearse
from rpcmp.pipelining.calibration import MeasuredSteps
from rpcmp.pipelining.planner import Planner, Timed
from rpcmp.process.fork_client import Forks

MOST_REHEARSALS, MOST_AGAIN = 5, 3
"""Plans that are rehearsed, and second rehearsals of those among the best two by then."""

REHEARSING_SECONDS = 240.0
"""The time after which no other rehearsal begins."""

STEPS = 6
"""Steps of a rehearsal that count, at least."""

LONGEST_REHEARSED = 10.0
"""Seconds of the longest step that is rehearsed."""


async def rehearse_best(planner: Planner, forks: Forks) -> str:
    """Train some steps of the best plans; return why not of all, if so."""
    ends = time.monotonic() + REHEARSING_SECONDS
    try:
        reason = await _rehearse_new(planner, forks, ends)
    except NonFiniteLossError as error:  # the run may be shorter, and has its schedulers
        return f"some steps were rehearsed, and {one_line(error)}"
    with contextlib.suppress(RpcmpError):  # what the first rehearsals have shown stands
        await _rehearse_again(planner, forks, ends)
    if reason or planner.to_rehearse() is None:
        return reason
    return "each one that was tried has shown others that may be faster"


async def _rehearse_new(planner: Planner, forks: Forks, ends: float) -> str:
    """Rehearse plans that were not yet, the best one first; returns why not all, if so.

    Raises:
        NonFiniteLossError: the loss diverges in these steps.
    """
    reason = ""
    for _ in range(MOST_REHEARSALS):
        if (timed := planner.to_rehearse()) is None:
            return reason
        if timed.step_s > LONGEST_REHEARSED:
            return f"a step would take about {timed.step_s:,.0f} s"
        if time.monotonic() > ends:
            return f"those that were took {REHEARSING_SECONDS:g} s"
        try:
            planner.learn(timed, await _trained(planner, timed, forks))
        except NonFiniteLossError:
            raise
        except RpcmpError as error:  # such as too little memory
            reason = (
                f"some steps of {list(timed.chain.balance)} were rehearsed, and {one_line(error)}"
            )
            planner.give_up(timed)
    return reason


async def _rehearse_again(planner: Planner, forks: Forks, ends: float) -> None:
    """Rehearse the best two plans once more, if either may be the faster one."""
    for _ in range(MOST_AGAIN):
        timed = planner.to_rehearse_again()
        if timed is None or time.monotonic() > ends:
            return
        planner.learn(timed, await _trained(planner, timed, forks))


async def _trained(planner: Planner, timed: Timed, forks: Forks) -> MeasuredSteps:
    job = planner.job(timed)
    measured = await rehearse(job, job.addresses, forks, LONGEST_REHEARSED, STEPS)
    return measured._replace(shared=())  # a plan's hosts have their own, perhaps limited, cores
