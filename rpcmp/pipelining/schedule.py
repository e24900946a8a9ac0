"""The order in which a stage runs its forwards and backwards.

One compute thread per stage asks its policy for the next action among those that are ready.
Forwards run in micro-batch order, and so do backwards and weight gradients, whatever the policy:
gradients are then summed in one order and a run gives the same bits under every schedule. With 3
stages and 4 micro-batches, equal times for all actions:

    gpipe: all forwards, then all backwards.           Keeps every micro-batch's activations.
        stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    1f1b: a backward as soon as there is one.          Keeps at most `depth` micro-batches.
        stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    zero-bubble: B is the input gradient, which goes upstream at once; W, the weight gradient, fills
    what would be a bubble.                            Keeps at most `max_in_flight` micro-batches.
        stage 0   F0 F1 F2 .  .  B0 .  F3 B1 .  B2 .  B3 .
        stage 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

In the last, no stage waits for stage 0, whose backwards are whole and take two units. Stage s lags
s weight gradients behind its backwards: all stages then walk in lockstep, backwards meet a stage
that is free, and a step takes no longer than filling the pipeline once and the work of one stage. A
weight gradient that starts whenever nothing else is ready costs more than the bubble it fills,
because the next backward arrives while it runs. With twice the `max_in_flight` the next step's
forwards fill the rest: no bubble at all.

If several micro-batches share a message, such a bundle counts as one micro-batch here.

To add a schedule: a class with the protocol `Policy` here, its entry in `POLICIES`, its name in
`rpcmp.config.types.Schedule`, its clock diagram in tests/unit/pipelining/test_schedule.py, and in
`rpcmp.pipelining.setting_grid` whether `tune` tries it by default.

Sources: GPipe (arXiv:1811.06965), PipeDream-Flush (arXiv:2006.09503), Zero Bubble Pipeline
Parallelism (arXiv:2401.10241), whose ZB-H1 and ZB-H2 are our smallest and largest useful
`max_in_flight`. Pure: no torch, no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rpcmp.errors import ConfigError


class Action(StrEnum):
    """An action of a compute thread for one micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The actions that a stage has done in this round, and those it could do next.

    Attributes:
        forwards, backwards, weights: how many are done; the next one's micro-batch index.
        forward_ready, backward_ready: whether everything that the next one needs has arrived.
    """

    num_microbatches: int
    forwards: int
    backwards: int
    weights: int
    forward_ready: bool
    backward_ready: bool


@dataclass(frozen=True, slots=True)
class StagePosition:
    """The position of a stage in the graph.

    Attributes:
        depth: stages on the longest way from this one to the loss, both included.
        longest: the largest depth of all stages.
        reads_stages: whether another stage waits for its input gradients.
    """

    depth: int
    longest: int
    reads_stages: bool


@dataclass(frozen=True, slots=True)
class InFlightLimits:
    """The most micro-batches, or bundles of them, that a stage may keep.

    Attributes:
        open: between forward and backward, with all of their activations.
        held: between forward and weight gradient.
        splits: whether weight gradients are actions of their own.
        deferred: weight gradients that a stage keeps for later if it can run something else.
    """

    open: int
    held: int
    splits: bool = False
    deferred: int = 0


class Policy(Protocol):
    """Chooses a stage's next action."""

    def limits(
        self, position: StagePosition, num_microbatches: int, max_in_flight: int | None
    ) -> InFlightLimits:
        """Return the limits of a stage; `max_in_flight` is None for the policy's own."""

    def choose(self, progress: RoundProgress, limits: InFlightLimits) -> Action | None:
        """Return the next action, always one that is ready, or None to wait."""


class GPipe:
    """Fill and drain: no backward before the last forward."""

    def limits(
        self, position: StagePosition, num_microbatches: int, max_in_flight: int | None
    ) -> InFlightLimits:
        if max_in_flight is not None and max_in_flight < num_microbatches:
            raise ConfigError(
                f"max_in_flight = {max_in_flight}: gpipe holds all {num_microbatches} "
                'micro-batches of a step; take schedule = "1f1b" or "zero-bubble"'
            )
        return InFlightLimits(num_microbatches, num_microbatches)

    def choose(self, progress: RoundProgress, limits: InFlightLimits) -> Action | None:
        if progress.forward_ready:
            return Action.FORWARD
        if progress.backward_ready and progress.forwards == progress.num_microbatches:
            return Action.BACKWARD
        return None


class OneForwardOneBackward:
    """Backward first, else a forward while fewer than `limits.open` micro-batches are open.

    More than `depth` of them, if `max_in_flight` allows it, hide the time on the wire.
    """

    def limits(
        self, position: StagePosition, num_microbatches: int, max_in_flight: int | None
    ) -> InFlightLimits:
        allowed = position.longest if max_in_flight is None else max_in_flight
        most = min(position.depth, allowed) + max(0, allowed - position.longest)
        return InFlightLimits(min(most, num_microbatches), min(most, num_microbatches))

    def choose(self, progress: RoundProgress, limits: InFlightLimits) -> Action | None:
        if progress.backward_ready:
            return Action.BACKWARD
        if progress.forward_ready and progress.forwards - progress.backwards < limits.open:
            return Action.FORWARD
        return None


class ZeroBubble:
    """Forwards up to the limit, then one weight gradient for each backward, `deferred` behind.

    `max_in_flight` is by default one more than the longest way to the loss. A stage far from the
    loss uses most of it for open micro-batches, and a stage close to it for waiting weight
    gradients. More than twice the longest way has no use. A stage that reads only the batch does
    not split, since no stage waits for its input gradients.
    """

    def limits(
        self, position: StagePosition, num_microbatches: int, max_in_flight: int | None
    ) -> InFlightLimits:
        held = position.longest + 1 if max_in_flight is None else max_in_flight
        held = min(held, 2 * position.longest)
        ahead = min(max(0, held - 1 - position.longest), position.depth - 1)
        most = min(position.depth + ahead, held, num_microbatches)
        if not position.reads_stages:
            return InFlightLimits(most, most)
        return InFlightLimits(most, held, splits=True, deferred=max(0, held - 1 - most))

    def choose(self, progress: RoundProgress, limits: InFlightLimits) -> Action | None:
        is_open = progress.forwards - progress.backwards
        waiting = progress.backwards - progress.weights
        if progress.forward_ready and is_open < limits.open and is_open + waiting < limits.held:
            return Action.FORWARD
        is_last = progress.backwards == progress.num_microbatches
        if waiting > limits.deferred or (waiting and is_last):
            return Action.WEIGHT
        return Action.BACKWARD if progress.backward_ready else None


POLICIES: dict[str, Policy] = {
    "gpipe": GPipe(),
    "1f1b": OneForwardOneBackward(),
    "zero-bubble": ZeroBubble(),
}
"""The values of `schedule` in a config."""


def policy(name: str) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"no schedule {name!r}; there are {', '.join(map(repr, POLICIES))}")
    return POLICIES[name]
