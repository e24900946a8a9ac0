"""Correct the model of a step by steps that were measured. Pure.

Layers that were measured by themselves (`HostProfile`) tell how the parts of a model compare, but
not how long a step takes: in a run their inputs come by messages, caches are cold, and other
processes use the same cores. Steps that were measured tell all of that, for the balance and the
options that they had. A calibration carries it over to others:

    computing    as measured; where layers move, their profiles are added and taken away
    messages     one cost for each, such that the simulation takes as long as the steps did
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from rpcmp.config.schema import Config
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.cost_model import Prediction, times_of, updates_of
from rpcmp.pipelining.partition import StageHost, bounds, choose_balance
from rpcmp.pipelining.simulation import ActionTimes

BISECTIONS = 10

NOTABLE = 0.08
"""The part of a step by which a term of a prediction may be wrong before it is worth a word."""


class TimedStep(Protocol):
    """A step as its event tells; see `StepEvent`."""

    @property
    def step_s(self) -> float: ...

    @property
    def data_share(self) -> float: ...

    @property
    def busy_seconds(self) -> Mapping[str, Mapping[str, float]]: ...


class MeasuredSteps(NamedTuple):
    """Consecutive steps under the same options; medians.

    Attributes:
        step_s: seconds of a step.
        data_share: the share of it in which the driver waited for samples.
        busy: seconds per step in which the workers of a stage compute, all together, by kind of
            action; see `StepReport.busy_seconds`.
    """

    step_s: float
    data_share: float
    busy: Mapping[str, Mapping[str, float]]


def summarize(config: Config, steps: Sequence[TimedStep]) -> MeasuredSteps:
    """Return the medians of at least one step of a job."""
    busy: dict[str, defaultdict[str, float]] = {
        stage: defaultdict(float) for stage in config.stage_names
    }
    for worker in config.workers:
        every = [step.busy_seconds.get(worker.label, {}) for step in steps]
        for kind in {kind for one in every for kind in one}:
            busy[worker.stage][kind] += statistics.median(one.get(kind, 0.0) for one in every)
    return MeasuredSteps(
        statistics.median(step.step_s for step in steps),
        statistics.median(step.data_share for step in steps),
        {stage: dict(kinds) for stage, kinds in busy.items()},
    )


@dataclass(frozen=True)
class Calibration:
    """What a step consists of, as measured.

    Attributes:
        times: of one micro-batch, by the stage's name; replicas count as one fast host.
        updates: seconds of each stage's optimizer.
        message_s: see `cost_model.simulate`. It stands for all that stages do besides their
            actions, and for cores that they share.
    """

    times: Mapping[str, ActionTimes]
    updates: Mapping[str, float]
    message_s: float

    @classmethod
    def fit(cls, config: Config, measured: MeasuredSteps) -> Calibration:
        """Fit the model to steps of a job, whose number of micro-batches is that of the steps."""
        times = {name: _times(config, name, busy) for name, busy in measured.busy.items()}
        updates = {  # replicas step at the same time
            name: busy.get("O", 0.0) / config.turns_of(name).num_replicas
            for name, busy in measured.busy.items()
        }
        # Every stage has two for each bundle, so that they would take the whole step.
        least, most = 0.0, measured.step_s / (2 * cost_model.num_bundles(config))
        for _ in range(BISECTIONS):
            between = (least + most) / 2
            if cost_model.step_seconds(config, times, updates, between) < measured.step_s:
                least = between
            else:
                most = between
        return cls(times, updates, least)

    def step_seconds(self, config: Config) -> float:
        """Return the seconds of a step of the same balance under a job's options."""
        return cost_model.step_seconds(config, self.times, self.updates, self.message_s)

    def moved(
        self, hosts: Sequence[StageHost], before: Sequence[int], after: Sequence[int]
    ) -> Calibration:
        """Return the calibration for another balance than the one that was measured."""
        times, updates = {}, {}
        here, there = times_of(hosts, before), times_of(hosts, after)
        updates_here, updates_there = updates_of(hosts, before), updates_of(hosts, after)
        for stage, own in self.times.items():
            parts = zip(own, there[stage], here[stage], strict=True)
            times[stage] = ActionTimes(*(max(0.0, a + (b - c)) for a, b, c in parts))
            update = self.updates[stage] + updates_there[stage] - updates_here[stage]
            updates[stage] = max(0.0, update)
        return Calibration(times, updates, self.message_s)


def _times(config: Config, stage: str, busy: Mapping[str, float]) -> ActionTimes:
    forward, backward, weight = (busy.get(kind, 0.0) for kind in "FBW")
    if not weight:  # both gradients were computed together; their products are of equal size
        backward, weight = backward / 2, backward / 2
    count = config.num_microbatches * config.turns_of(stage).num_replicas
    return ActionTimes(forward, backward, weight).scaled(1 / count)


@dataclass(frozen=True)
class Forecast:
    """A balance, and what is known about its steps.

    Attributes:
        hosts: of each stage, in order, with the layers as measured by themselves.
        calibration: None: no steps were measured.
    """

    hosts: Sequence[StageHost]
    balance: list[int]
    calibration: Calibration | None = None

    def predict(self, config: Config) -> Prediction:
        """Predict a step under a job's options; `config`: from `with_full_microbatches`."""
        known = self.calibration
        if known is None:
            return cost_model.predict(config, self.hosts, self.balance)
        return cost_model.predict(
            *(config, self.hosts, self.balance, known.times, known.updates, known.message_s)
        )

    def rehearsed(self, config: Config, measured: MeasuredSteps) -> Forecast:
        """Return the forecast that follows from steps of this balance."""
        return Forecast(self.hosts, self.balance, Calibration.fit(config, measured))

    def improved(self, config: Config) -> Forecast:
        """Return the forecast of the balance that the measured steps suggest, if it is faster.

        What a stage computes besides its layers stays there: messages, the loss, its neighbours.
        """
        if self.calibration is None:
            return self
        parts = self.predict(config).stages.values()
        hosts = [
            replace(host, besides_s=part.busy_s - host.seconds(start, end))
            for host, part, (start, end) in zip(
                self.hosts, parts, bounds(self.balance), strict=True
            )
        ]
        balance = choose_balance(hosts)
        moved = self.calibration.moved(self.hosts, self.balance, balance)
        other = Forecast(self.hosts, balance, moved)
        return other if other.predict(config).step_s < self.predict(config).step_s else self


def what_was_wrong(config: Config, predicted: Prediction, measured: MeasuredSteps) -> str:
    """Return which term of a prediction was wrong most, in words; empty: none by much."""
    step = measured.step_s
    busy = {
        name: sum(kinds.values()) / config.turns_of(name).num_replicas
        for name, kinds in measured.busy.items()
    }
    data = measured.data_share * step
    terms = [
        (f"{name} computes", part.busy_s, busy[name]) for name, part in predicted.stages.items()
    ]
    terms.append(("the driver waits for samples", 0.0, data))
    most = max(busy.values())
    others = max(0.0, predicted.step_s - max(part.busy_s for part in predicted.stages.values()))
    terms.append(("messages and pauses of the busiest stage take", others, step - most - data))
    return _most_wrong(terms, NOTABLE * step)


def _most_wrong(terms: Iterable[tuple[str, float, float]], notable: float) -> str:
    what, before, now = max(terms, key=lambda term: abs(term[2] - term[1]))
    if abs(now - before) < notable:
        return ""
    return f"{what} {now * 1e3:,.1f} ms a step, not {before * 1e3:,.1f}"
