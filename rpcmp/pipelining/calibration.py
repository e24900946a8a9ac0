"""Correct the model of a step by steps that were measured. Pure.

Layers that were measured by themselves (`HostProfile`) tell how the parts of a model compare, but
not how long a step takes: in a run their inputs come by messages, caches are cold, and other
processes use the same cores. Steps that were measured tell all of that, for the balance and the
options that they had. A calibration carries it over to others:

    computing    as measured; where layers move, what they take by themselves goes with them
    cores        those that too many stages share are simulated; computing is without what it has
                 waited for them
    messages     one cost for each, such that the simulation takes as long as the steps did
    loading      as measured: a step takes at least as long as its samples do
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.cost_model import Prediction, times_of, updates_of
from rpcmp.pipelining.partition import StageHost, bounds, choose_balance
from rpcmp.pipelining.setting_grid import FASTER, MEMORY_SHARE, options_to_try
from rpcmp.pipelining.simulation import ActionTimes, SharedCores, waits_for_cores

BISECTIONS = 10

NOTABLE = 0.08
"""The part of a step that is worth a word, or other layers at a stage."""

MOSTLY = 0.5
"""The share of a stage's computing for which it has a core, above which it counts as using one."""

WAITING = 0.8
"""The share of a step in which the driver waits for samples, above which these set its time."""


class TimedStep(Protocol):
    """A step as its event tells; see `StepEvent`."""

    @property
    def step_s(self) -> float: ...

    @property
    def data_share(self) -> float: ...

    @property
    def busy_seconds(self) -> Mapping[str, Mapping[str, float]]: ...

    @property
    def core_seconds(self) -> Mapping[str, Mapping[str, float]] | None: ...


class MeasuredSteps(NamedTuple):
    """Consecutive steps under the same options; medians.

    Attributes:
        step_s: seconds of a step.
        data_share: the share of it in which the driver waited for samples.
        busy: seconds per step in which the workers of a stage compute, all together, by kind of
            action; see `StepReport.busy_seconds`.
        shared: the cores that stages share, which compute on them for most of their busy time.
    """

    step_s: float
    data_share: float
    busy: Mapping[str, Mapping[str, float]]
    shared: Sequence[SharedCores] = ()

    @property
    def computing(self) -> Mapping[str, Mapping[str, float]]:
        """`busy`, without the time in which stages waited for a core."""
        waited = waits_for_cores(self.shared)
        parts = {
            stage: 1 - waited.get(stage, 0.0) / max(sum(kinds.values()), 1e-9)
            for stage, kinds in self.busy.items()
        }
        return {
            stage: {kind: parts[stage] * seconds for kind, seconds in kinds.items()}
            for stage, kinds in self.busy.items()
        }


def summarize(
    config: Config, steps: Sequence[TimedStep], shared: Sequence[SharedCores] = ()
) -> MeasuredSteps:
    """Return the medians of at least one step of a job.

    Args:
        shared: the stages that are on hosts with fewer cores.
    """
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
        [each for cores in shared if (each := _as_used(cores, busy, steps)) is not None],
    )


def _as_used(
    cores: SharedCores, busy: Mapping[str, Mapping[str, float]], steps: Sequence[TimedStep]
) -> SharedCores | None:
    """Return the stages that compute on cores, and how long they wait; None if there are enough.

    A stage that sleeps, or has an accelerator, hardly uses any. If they hardly wait, they are on
    different hosts of the same name.
    """
    waited, computing = {}, 0.0
    for stage in cores.waited:
        times = [each for step in steps if (each := (step.core_seconds or {}).get(stage))]
        total = sum(busy[stage].values())
        if not times or not total:
            continue
        used, waits = (statistics.median(each[key] for each in times) for key in ("used", "waited"))
        waits = min(waits, max(0.0, total - used))  # a part of it may be between two actions
        if used > MOSTLY * (total - waits):
            waited[stage] = waits
            computing += total
    are_few = len(waited) > cores.number and sum(waited.values()) > NOTABLE * computing
    return SharedCores(cores.number, waited) if are_few else None


@dataclass(frozen=True)
class Calibration:
    """What a step consists of, as measured.

    Attributes:
        times: of one micro-batch, by the stage's name; replicas count as one fast host.
        updates: seconds of each stage's optimizer.
        message_s: see `cost_model.simulate`. It stands for all that stages do besides their
            actions.
        shared: the cores that stages share.
        loading_s: seconds for the samples of a step, which are loaded beside the one before.
    """

    times: Mapping[str, ActionTimes]
    updates: Mapping[str, float]
    message_s: float
    loading_s: float
    shared: Sequence[SharedCores] = ()

    @classmethod
    def fit(
        cls, config: Config, measured: MeasuredSteps, wires: cost_model.Wires | None = None
    ) -> Calibration:
        """Fit the model to steps of a job, whose number of micro-batches is that of the steps.

        Args:
            wires: what messages take between hosts, if that is known by itself.
        """
        computing, shared = measured.computing, measured.shared
        times = {name: _times(config, name, busy) for name, busy in computing.items()}
        updates = {  # replicas step at the same time
            name: busy.get("O", 0.0) / config.turns_of(name).num_replicas
            for name, busy in computing.items()
        }
        if measured.data_share > WAITING:  # stages wait, so that their steps do not tell
            return cls(times, updates, 0.0, measured.step_s, shared)
        # Every stage has two for each bundle: more each than that would take the whole step.
        least, most = 0.0, measured.step_s / (2 * cost_model.num_bundles(config))
        for _ in range(BISECTIONS):
            between = (least + most) / 2
            step = cost_model.step_seconds(config, times, updates, between, wires, shared)
            if step < measured.step_s:
                least = between
            else:
                most = between
        return cls(times, updates, least, measured.data_share * measured.step_s, shared)

    def step_seconds(self, config: Config) -> float:
        """Return the seconds of a step of the same balance under a job's options."""
        step = cost_model.step_seconds(
            config, self.times, self.updates, self.message_s, shared=self.shared
        )
        return max(step, self.loading_s)

    def moved(
        self,
        hosts: Sequence[StageHost],
        before: Sequence[int],
        after: Sequence[int],
        in_proportion: bool = False,
    ) -> Calibration:
        """Return the calibration for another balance than the one that was measured.

        Args:
            in_proportion: whether a stage takes as many times its layers' own time as before, as
                where cores are shared; if not, it takes as much longer than that as before.
        """
        here, there = times_of(hosts, before), times_of(hosts, after)
        updates_here, updates_there = updates_of(hosts, before), updates_of(hosts, after)

        def move(own: float, old: float, new: float) -> float:
            return own * new / old if in_proportion and old else max(0.0, own + new - old)

        times = {
            stage: ActionTimes(*map(move, own, here[stage], there[stage]))
            for stage, own in self.times.items()
        }
        updates = {
            stage: move(own, updates_here[stage], updates_there[stage])
            for stage, own in self.updates.items()
        }
        return replace(self, times=times, updates=updates)


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
        note: why not, if that is worth a word.
    """

    hosts: Sequence[StageHost]
    balance: list[int]
    calibration: Calibration | None = None
    note: str = ""

    def predict(self, config: Config) -> Prediction:
        """Predict a step under a job's options; `config`: from `Config.with_full_microbatches`."""
        known, hosts = self.calibration, cost_model.hosts_under(config, self.hosts)
        if known is None:
            return cost_model.predict(config, hosts, self.balance)
        return cost_model.predict(
            *(config, hosts, self.balance, known.times, known.updates),
            *(known.message_s, known.loading_s, known.shared),
        )

    def fastest_options(self, config: Config) -> ScheduleOptions:
        """Return the options that a run best starts with, of those that it may try and that fit.

        Without measured steps they are its own: what messages cost decides.
        """
        if (known := self.calibration) is None:
            return config.options
        own, *others = options_to_try(config)
        jobs = {one: one.on(config).with_full_microbatches() for one in (own, *others)}
        usual = cost_model.hosts_under(jobs[own], self.hosts)
        seconds = {
            one: known.step_seconds(job)
            for one, job in jobs.items()
            if one == own or self._fits(usual, job)
        }
        fastest = min(seconds, key=seconds.__getitem__)
        return fastest if seconds[fastest] < FASTER * seconds[own] else own

    def _fits(self, usual: Sequence[StageHost], config: Config) -> bool:
        """Return whether a job's options leave every host most of what is free there.

        Args:
            usual: the hosts under the options that are the config's own.
        """
        others = cost_model.hosts_under(config, self.hosts)
        hosts = zip(usual, others, bounds(self.balance), strict=True)
        return all(
            other.memory(*part) - own.memory(*part) <= MEMORY_SHARE * max(0, -own.overrun(*part))
            for own, other, part in hosts
        )

    def corrected(self, config: Config, measured: MeasuredSteps) -> Forecast:
        """Return the forecast that follows from steps of this balance."""
        return Forecast(self.hosts, self.balance, Calibration.fit(config, measured))

    def improved(self, config: Config) -> Forecast:
        """Return the forecast of the balance that the measured steps suggest, if it is faster.

        What a stage computes besides its layers may stay there, as the loss does, or go with them:
        another balance has to be clearly faster either way. It fits into memory under the job's
        options; the balance of the measured steps does, whatever was measured of its layers.
        """
        if self.calibration is None:
            return self
        parts = self.predict(config).stages.values()
        now, hosts = cost_model.hosts_under(config, self.hosts), []
        for host, part, cut in zip(now, parts, bounds(self.balance), strict=True):
            besides = host.besides_s + part.busy_s - host.seconds(*cut)
            limit = None if host.limit_bytes is None else max(host.limit_bytes, host.memory(*cut))
            hosts.append(replace(host, besides_s=besides, limit_bytes=limit))
        return self.better(config, choose_balance(hosts))

    def better(
        self, config: Config, balance: list[int], ways: Sequence[bool] = (False, True)
    ) -> Forecast:
        """Return the forecast of another balance, if it is clearly faster in all `ways`.

        Args:
            ways: whether layers count in proportion; see `Calibration.moved`.
        """
        if self.calibration is None:
            return self
        known = self.calibration
        moved = [known.moved(self.hosts, self.balance, balance, way) for way in ways]
        seconds = [each.step_seconds(config) for each in moved]
        slowest = max(range(len(moved)), key=seconds.__getitem__)
        if seconds[slowest] >= (1 - NOTABLE) * known.step_seconds(config):
            return self
        return Forecast(self.hosts, balance, moved[slowest])


def what_was_wrong(config: Config, predicted: Prediction, measured: MeasuredSteps) -> str:
    """Return which term of a prediction was wrong most, in words; empty: it was right."""
    step = measured.step_s
    if abs(predicted.step_s - step) < NOTABLE * step:
        return ""
    busy = {
        name: sum(kinds.values()) / config.turns_of(name).num_replicas
        for name, kinds in measured.busy.items()
    }
    if measured.data_share > WAITING:
        return _wrong("loading the samples takes", predicted.loading_s, step)
    terms = [
        (f"{name} computes", part.busy_s, busy[name]) for name, part in predicted.stages.items()
    ]
    others = predicted.step_s - max(part.busy_s for part in predicted.stages.values())
    pauses = step - max(busy.values())
    terms.append(("messages and pauses of the busiest stage take", others, pauses))
    return _wrong(*max(terms, key=lambda term: abs(term[2] - term[1])))


def _wrong(what: str, before: float, now: float) -> str:
    return f"{what} {now * 1e3:,.1f} ms a step, not {before * 1e3:,.1f}"
