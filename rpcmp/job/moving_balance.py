"""The balance of a run that may change between two steps, and what it goes back to.

    want ──the driver process pauses──> change ──a step of the next generation──> confirmed
                                           ├──fault before that──> go_back, to the balance before
                                           └──later, faults without a new step──> go_back, once

Its schedule options may differ from the config's as well (`rpcmp.driver.self_tuning`). Faults
without a new step may be theirs: the next generation is then under the config's own.

Its stages may change with it, when hosts join or leave (`rpcmp.job.membership`).

A generation with another balance starts from the snapshots in memory, like any other. Until it has
done a step, whatever goes wrong counts against the new balance: the next generation has the former.
Whether another one would be faster, `rpcmp.pipelining.rebalancing` knows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, StageError, UnavailableError, WorkerDiedError, WorkerHungError
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


class Change(NamedTuple):
    """What a run goes on with.

    Attributes:
        config: with another balance, and perhaps other stages.
        reason: why.
        hosts: of the stages, as far as they are known; None: the stages are the same.
        joined: addresses of servers that serve further stages.
        is_forced: whether the stages before cannot be had again, as a host has left.
        fits_options: whether its layers fit into memory under the options that the run has by then,
            and not only under the config's own.
    """

    config: Config
    reason: str
    hosts: Sequence[StageHost] | None = None
    joined: Sequence[str] = ()
    is_forced: bool = False
    fits_options: bool = True


class MovingBalance:
    """The config of a run's next generation.

    Args:
        report: called when layers have moved, or could not, or should.
        hosts: of the stages, if the layers were measured there.

    Attributes:
        config: with the balance that the next generation has.
        balance: layers of each stage of the last generation that was formed.
        num_changes: how many generations were formed for another balance, or to go back.
        leaves_options: whether the next generation is under the config's own options, whichever the
            run has had; until there is a step under them.
        are_hosts_measured: whether `hosts` were given.
        failed: the stages with which the run could not go on when a host had left.
    """

    def __init__(
        self, config: Config, report: Callable[[Event], None], hosts: Sequence[StageHost] = ()
    ) -> None:
        self.config, self._report = config, report
        self.num_changes = 0
        self.leaves_options = False
        self.are_hosts_measured = bool(hosts)
        self.failed: list[frozenset[str]] = []
        self._watch = BalanceWatch(config, hosts)
        self._options: Mapping[str, Any] = {}
        self.balance: list[int] = []
        self._total = 0
        self._wanted: Change | None = None
        self._change: RebalanceEvent | None = None
        self._confirmed: RebalanceEvent | None = None
        self._before: tuple[Config, BalanceWatch, Mapping[str, Any], bool]
        self._before = config, self._watch, self._options, self.leaves_options
        self._num_failed, self._is_forced = 0, False
        self._started = self._seconds = 0.0

    def start(self, layers: Mapping[str, Sequence[str]], seconds: float) -> None:
        """Start to watch a generation that was formed in `seconds`, with these layers per stage."""
        self.balance = [len(names) for names in layers.values()]
        self._watch.start(self.balance, seconds)
        self._seconds = time.monotonic() - self._started

    def add(self, event: Event) -> Proposal | None:
        """Add an event of the driver process; returns the balance to change to, if any.

        With `rebalance = "suggest"` it is reported instead, once.
        """
        match event:
            case StartEvent():
                self._total = event.steps
            case ScheduleEvent():
                self._options = event.options
                self._watch.use_options(event.options)
            case StepEvent():
                return self._add_step(event)
        return None

    def _add_step(self, event: StepEvent) -> Proposal | None:
        self.confirm(event.step)
        self.leaves_options = False
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
                before=self.balance,
                reason=proposal.reason,
                seconds=0.0,
            )
        )
        return None

    @property
    def options(self) -> ScheduleOptions:
        """The schedule options that the run has now."""
        return self.config.model_copy(update=self._options).options

    @property
    def hosts(self) -> list[StageHost]:
        """The hosts of the stages, as far as they are known."""
        return self._watch.hosts

    @property
    def is_changing(self) -> bool:
        """Whether a change is wanted that has not taken effect."""
        return self._wanted is not None

    def want(self, change: Change) -> None:
        """Note what to change to, which takes effect with `take_wanted`."""
        self._wanted = change

    def take_wanted(self, step: int) -> Change | None:
        """Let the next generation have what is wanted after `step`; return it, if there is any."""
        change, self._wanted = self._wanted, None
        if change is not None:
            self.change(change, step)
        return change

    def change(self, change: Change, step: int) -> None:
        """Let the next generation have another balance after `step`.

        If the change before has not been confirmed by a step, a fault undoes both.
        """
        unproven = self._change
        if unproven is None:
            self._before = self.config, self._watch, self._options, self.leaves_options
        self._change = RebalanceEvent(
            step=step,
            outcome="moved",
            balance=_balance_of(change.config),
            before=self.balance if unproven is None else unproven.before,
            reason=change.reason if unproven is None else f"{unproven.reason}; {change.reason}",
            seconds=0.0,
        )
        self.config = change.config
        if change.hosts is not None:
            self._watch = BalanceWatch(change.config, change.hosts, are_guessed=True)
            self._watch.use_options(self._options)
        if not change.fits_options:
            self._use_own_options()
        self._num_failed = 0
        self._is_forced = change.is_forced or (unproven is not None and self._is_forced)
        self._started, self.num_changes = time.monotonic(), self.num_changes + 1

    def confirm(self, step: int) -> None:
        """Report the change, if `step` is the first one after it."""
        if self._change is not None and step > self._change.step:
            self._confirmed, self._change = self._change, None
            self._emit(self._confirmed, self._seconds)

    def go_back(self, error: Exception, is_repeated: bool = False) -> bool:
        """Return to the balance before, if the present one has not done a step; return whether.

        Also, once, if the fault `is_repeated` without a new step since: the layers may not fit.
        Where a host has left, only if the fault is no lost server, and was not the first: the stage
        that there was has nobody to serve it.
        """
        self._wanted = None
        change = self._change
        if self._is_forced and not self._has_failed_again(error):
            return False
        if change is None and is_repeated and isinstance(error, OF_BALANCE):
            change, self._started = self._confirmed, time.monotonic()
        if change is None:
            return False
        self._change = self._confirmed = None
        self.config, self._watch, self._options, self.leaves_options = self._before
        self._watch.refused.append(change.balance)
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

    def leave_options(self, error: Exception) -> bool:
        """Leave the run's options, if a fault without a new step may be theirs; return whether."""
        if self.options == self.config.options or not isinstance(error, OF_BALANCE):
            return False
        self._use_own_options()
        return True

    def _use_own_options(self) -> None:
        self.leaves_options, self._options = True, {}
        self._watch.use_options(self.config.options.model_dump(exclude={"num_microbatches"}))

    def _has_failed_again(self, error: Exception) -> bool:
        """Return whether the run cannot go on without a host that has left."""
        if self._change is None:  # it has gone on
            return False
        self._num_failed += 1
        if isinstance(error, UnavailableError) or (
            self._num_failed == 1 and not isinstance(error, ConfigError)
        ):
            return False
        self.failed.append(frozenset(self.config.stage_names))
        return True

    def _emit(self, event: RebalanceEvent, seconds: float) -> None:
        self._report(dataclasses.replace(event, seconds=seconds))


def _balance_of(config: Config) -> list[int]:
    balance = config.model and config.model.balance
    if not isinstance(balance, list):
        raise AssertionError("only numbers of layers can be changed to")
    return balance
