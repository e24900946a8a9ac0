"""The balance of a run that may change between two steps, and what it goes back to.

    want ──the driver process pauses──> change ──a step of the next generation──> confirmed
                                           ├──fault before that──> go_back, to the balance before
                                           └──later, faults without a new step──> go_back, once

A generation with another balance starts from the snapshots in memory, like any other. Until it has
done a step, whatever goes wrong counts against the new balance: the next generation has the former.
Whether another one would be faster, `rpcmp.pipelining.rebalancing` knows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from rpcmp.config.schema import Config
from rpcmp.errors import StageError, WorkerDiedError, WorkerHungError
from rpcmp.observability.events import (
    Event,
    RebalanceEvent,
    ScheduleEvent,
    StartEvent,
    StepEvent,
)
from rpcmp.pipelining.partition import StageHost
from rpcmp.pipelining.rebalancing import BalanceWatch, Proposal

OF_BALANCE = (WorkerDiedError, WorkerHungError, StageError)
"""Faults that another balance may not have, such as a worker that the kernel ended for memory."""


class MovingBalance:
    """The config of a run's next generation.

    Args:
        report: called when layers have moved, or could not, or should.
        hosts: of the stages, if the layers were measured there.

    Attributes:
        config: with the balance that the next generation has.
        num_changes: how many generations were formed for another balance, or to go back.
    """

    def __init__(
        self, config: Config, report: Callable[[Event], None], hosts: Sequence[StageHost] = ()
    ) -> None:
        self.config, self._report = config, report
        self.num_changes = 0
        self._watch = BalanceWatch(config, hosts)
        self._balance: list[int] = []
        self._total = 0
        self._wanted: tuple[list[int], str] | None = None
        self._change: RebalanceEvent | None = None
        self._confirmed: RebalanceEvent | None = None
        self._config_before = config
        self._started = self._seconds = 0.0

    def start(self, layers: Mapping[str, Sequence[str]], seconds: float) -> None:
        """Start to watch a generation that was formed in `seconds`, with these layers per stage."""
        self._balance = [len(names) for names in layers.values()]
        self._watch.start(self._balance, seconds)
        self._seconds = time.monotonic() - self._started

    def add(self, event: Event) -> Proposal | None:
        """Add an event of the driver process; returns the balance to change to, if any.

        With `rebalance = "suggest"` it is reported instead, once.
        """
        match event:
            case StartEvent():
                self._total = event.steps
            case ScheduleEvent():
                self._watch.use_options(event.options)
            case StepEvent():
                return self._add_step(event)
        return None

    def _add_step(self, event: StepEvent) -> Proposal | None:
        self.confirm(event.step)
        if self.config.rebalance == "off" or self._wanted is not None:
            return None
        proposal = self._watch.add(event, self._total - event.step)
        if proposal is None or self.config.rebalance == "auto":
            return proposal
        self._watch.refused.append(proposal.balance)
        self._report(
            RebalanceEvent(
                step=event.step,
                outcome="suggested",
                balance=proposal.balance,
                before=self._balance,
                reason=proposal.reason,
                seconds=0.0,
            )
        )
        return None

    def want(self, balance: list[int], reason: str) -> None:
        """Note the balance to change to, which takes effect with `change`."""
        self._wanted = balance, reason

    def change(self, step: int) -> None:
        """Let the next generation have the wanted balance, after `step`."""
        if self._wanted is None:
            raise AssertionError("no other balance is wanted")
        (balance, reason), self._wanted = self._wanted, None
        self._change = RebalanceEvent(
            step=step,
            outcome="moved",
            balance=balance,
            before=self._balance,
            reason=reason,
            seconds=0.0,
        )
        self._config_before, self.config = self.config, self.config.with_balance(balance)
        self._started, self.num_changes = time.monotonic(), self.num_changes + 1

    def confirm(self, step: int) -> None:
        """Report the change, if `step` is the first one after it."""
        if self._change is not None and step > self._change.step:
            self._confirmed, self._change = self._change, None
            self._emit(self._confirmed, self._seconds)

    def go_back(self, error: Exception, is_repeated: bool = False) -> bool:
        """Return to the balance before, if the present one has not done a step; return whether.

        Also, once, if the fault `is_repeated` without a new step since: the layers may not fit.
        """
        self._wanted = None
        change = self._change
        if change is None and is_repeated and isinstance(error, OF_BALANCE):
            change, self._started = self._confirmed, time.monotonic()
        if change is None:
            return False
        self._change = self._confirmed = None
        self._watch.refused.append(change.balance)
        self.config = self._config_before
        self.num_changes += 1
        self._emit(
            dataclasses.replace(
                change,
                outcome="undone",
                balance=change.before,
                before=change.balance,
                reason=str(error),
            ),
            time.monotonic() - self._started,
        )
        return True

    def _emit(self, event: RebalanceEvent, seconds: float) -> None:
        self._report(dataclasses.replace(event, seconds=seconds))
