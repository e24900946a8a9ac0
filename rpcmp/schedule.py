"""In which order a stage does its forwards and backwards.

One compute thread a stage asks its policy for the next action among those that are ready. Forwards
run in micro-batch order, and so do backwards, whatever the policy: gradients are then summed in
one order and a run gives the same bits under every schedule. With 3 stages and 4 micro-batches,
equal times for all actions:

    gpipe: all forwards, then all backwards.           Keeps every micro-batch's activations.
        stage 0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        stage 1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        stage 2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .
    1f1b: a backward as soon as there is one.          Keeps at most `depth` micro-batches.
        stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Sources: GPipe (arXiv:1811.06965), PipeDream-Flush (arXiv:2006.09503). Pure: no torch, no threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rpcmp.errors import ConfigError


class Action(StrEnum):
    """What a compute thread can do for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a stage has done in this round, and what it could do next.

    Attributes:
        num_microbatches: micro-batches of the round.
        forwards, backwards: how many are done; the next one's micro-batch index.
        forward_ready, backward_ready: whether everything that the next one needs has arrived.
    """

    num_microbatches: int
    forwards: int
    backwards: int
    forward_ready: bool
    backward_ready: bool


class Policy(Protocol):
    """Chooses a stage's next action."""

    def limit(self, depth: int, num_microbatches: int) -> int:
        """How many micro-batches a stage may hold between forward and backward.

        Args:
            depth: stages on the longest way from this one to the loss, both included.
            num_microbatches: micro-batches a step.
        """

    def choose(self, progress: Progress, limit: int) -> Action | None:
        """The next action, or None to wait. Never an action that is not ready."""


class GPipe:
    """Fill and drain: no backward before the last forward."""

    def limit(self, depth: int, num_microbatches: int) -> int:
        return num_microbatches

    def choose(self, progress: Progress, limit: int) -> Action | None:
        if progress.forward_ready:
            return Action.FORWARD
        if progress.backward_ready and progress.forwards == progress.num_microbatches:
            return Action.BACKWARD
        return None


class OneForwardOneBackward:
    """Backward first, else a forward while fewer than `limit` micro-batches are open."""

    def limit(self, depth: int, num_microbatches: int) -> int:
        return min(depth, num_microbatches)

    def choose(self, progress: Progress, limit: int) -> Action | None:
        if progress.backward_ready:
            return Action.BACKWARD
        if progress.forward_ready and progress.forwards - progress.backwards < limit:
            return Action.FORWARD
        return None


POLICIES: dict[str, Policy] = {"gpipe": GPipe(), "1f1b": OneForwardOneBackward()}
"""The values of `schedule` in a config."""


def policy(name: str) -> Policy:
    """The policy called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"no schedule {name!r}; there are {', '.join(map(repr, POLICIES))}")
    return POLICIES[name]
