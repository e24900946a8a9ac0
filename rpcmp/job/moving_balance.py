"""The balance of a run that may change between two steps, and what it goes back to.

    want ──the driver process pauses──> change ──a step of the next generation──> confirmed
                                           └──fault before that──> go_back, to the balance before

A generation with another balance starts from the snapshots in memory, like any other. Until it has
done a step, whatever goes wrong counts against the new balance: the next generation has the former.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from rpcmp.config.schema import Config
from rpcmp.observability.events import Event, RebalanceEvent


class MovingBalance:
    """The config of a run's next generation.

    Args:
        report: called when layers have moved, or could not.

    Attributes:
        config: with the balance that the next generation has.
        num_changes: how many generations were formed for another balance, or to go back.
        refused: the balances that have failed.
    """

    def __init__(self, config: Config, report: Callable[[Event], None]) -> None:
        self.config, self._report = config, report
        self.num_changes = 0
        self.refused: list[list[int]] = []
        self._wanted: tuple[list[int], str] | None = None
        self._change: RebalanceEvent | None = None
        self._config_before = config
        self._started = 0.0

    def want(self, balance: list[int], reason: str) -> None:
        """Note the balance to change to, which takes effect with `change`."""
        self._wanted = balance, reason

    def change(self, step: int, layers: Mapping[str, Sequence[str]]) -> None:
        """Let the next generation have the wanted balance, after `step`.

        Args:
            layers: of each stage until now.
        """
        if self._wanted is None:
            raise AssertionError("no other balance is wanted")
        (balance, reason), self._wanted = self._wanted, None
        before = [len(names) for names in layers.values()]
        self._change = RebalanceEvent(
            step=step, outcome="moved", balance=balance, before=before, reason=reason, seconds=0.0
        )
        self._config_before, self.config = self.config, self.config.with_balance(balance)
        self._started, self.num_changes = time.monotonic(), self.num_changes + 1

    def confirm(self, step: int) -> None:
        """Report the change, if `step` is the first one after it."""
        if self._change is not None and step > self._change.step:
            self._emit(self._change)

    def go_back(self, error: Exception) -> bool:
        """Return to the balance before, if the present one has not done a step; return whether."""
        self._wanted = None
        change = self._change
        if change is None:
            return False
        self.refused.append(change.balance)
        self.config = self._config_before
        self.num_changes += 1
        self._emit(
            dataclasses.replace(
                change,
                outcome="undone",
                balance=change.before,
                before=change.balance,
                reason=str(error),
            )
        )
        return True

    def _emit(self, event: RebalanceEvent) -> None:
        self._change = None
        seconds = time.monotonic() - self._started
        self._report(dataclasses.replace(event, seconds=seconds))
