"""Notice that a stage's host has become slower or faster for good, and what balance would suit it.

    settled   a block of steps, some steps after the balance was last changed
    watched   blocks since then: a stage that computes CHANGED times as long, or as short, for a
              while has another host than it had: its layers count as so much slower or faster
    weighed   a balance that is clearly faster on these hosts is worth it if what it saves in
              `rebalance_within` steps, and in the steps that are left, is more than what it
              costs to form a group
    proved    the first steps of a balance tell how fast its hosts really are with it: a further one
              may be clearly faster, or the one before, to which the run then goes back for good.
              MOST_CORRECTIONS such moves follow from a change, and perhaps a last way back

Layers that were measured on the hosts tell how they compare. If none were, those of a stage count
as equal, and hosts as equally fast when the run had settled. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from rpcmp.config.schema import Config
from rpcmp.pipelining.calibration import Calibration, Forecast, MeasuredSteps, TimedStep, summarize
from rpcmp.pipelining.partition import HostProfile, LayerProfile, StageHost, bounds

WARM_STEPS = 3
"""First steps of a group, which touch memory and code for the first time."""

BLOCK_SECONDS = 1.0
FEWEST_STEPS = 3
LONG_SECONDS = 3.0
"""Of a block: at least as many steps and so long. Once settled, LONG_SECONDS are enough as well: it
takes several such blocks to believe in a change."""

SETTLE_BLOCKS = 2
"""Blocks of a balance until the last of them counts as what its stages take."""

CHANGED = 1.25
"""How much longer or shorter a stage must compute than when it had settled."""

PATIENCE = 3
"""Blocks in a row in which it must; twice as many after each time that nothing was worth it."""

MOST_PATIENCE = 96

MOST_CORRECTIONS = 2
"""Moves that the first steps of a balance may suggest, until a host changes again."""

MOST_WAITING = 0.5
"""The share of a step in which the driver waits for samples, above which no balance helps."""


class Proposal(NamedTuple):
    """A balance to change to, and why.

    Attributes:
        step_s: seconds per step that it is predicted to take.
    """

    balance: list[int]
    reason: str
    step_s: float


class WatchedStep(TimedStep, Protocol):
    """A step as its event tells; see `StepEvent`."""

    @property
    def step(self) -> int: ...

    @property
    def samples_per_s(self) -> float: ...


class BalanceWatch:
    """Watches the steps of a run with a list of layers.

    Args:
        config: the job.
        hosts: of its stages, in order, with the layers measured there; empty: none were.
        are_guessed: whether some hosts are not as measured, so that the first steps tell.

    Attributes:
        refused: balances that are not proposed.
    """

    def __init__(
        self, config: Config, hosts: Sequence[StageHost] = (), are_guessed: bool = False
    ) -> None:
        self._config = config.with_full_microbatches()
        self._hosts = list(hosts)
        self._hosts_by_proposal = self._hosts
        self._knows_layers = bool(hosts) and not are_guessed
        self._are_guessed = bool(hosts) and are_guessed
        self.refused: list[list[int]] = []
        self._balance: list[int] = []
        self._cost_s = 0.0
        self._steps: list[WatchedStep] = []
        self._warm = self._samples = self._num_blocks = self._num_changed = 0
        self._num_corrections = 0
        self._settled: MeasuredSteps | None = None
        self._before: list[int] | None = None
        self._proposed: list[int] | None = None
        self._patience = PATIENCE

    def start(self, balance: list[int], cost_s: float) -> None:
        """Start with a group under this balance, which took `cost_s` seconds to form."""
        self._cost_s = cost_s
        self._steps.clear()
        self._warm = WARM_STEPS
        self._num_changed = 0
        if balance == self._balance:
            return
        # What others have asked for is theirs to judge.
        self._before = self._balance if balance == self._proposed else None
        self._balance, self._settled, self._num_blocks = balance, None, 0
        self._hosts = self._hosts_by_proposal

    def use_options(self, options: Mapping[str, Any]) -> None:
        """Predict steps under these keys of a config from now on."""
        self._config = self._config.model_copy(update=options)

    def add(self, step: WatchedStep, steps_left: int) -> Proposal | None:
        """Add a step; returns what it suggests, if anything."""
        samples = round(step.samples_per_s * step.step_s)
        if self._warm or samples < self._samples or not self._is_complete(step):
            self._warm = max(0, self._warm - 1)
            return None
        if samples > self._samples:
            self._samples = samples
            self._steps.clear()
        self._steps.append(step)
        seconds = sum(each.step_s for each in self._steps)
        is_long = self._settled is not None and seconds >= LONG_SECONDS
        if seconds < BLOCK_SECONDS or not (is_long or len(self._steps) >= FEWEST_STEPS):
            return None
        measured = summarize(self._config, self._steps)
        self._steps.clear()
        return self._judge(measured, steps_left)

    def _is_complete(self, step: WatchedStep) -> bool:
        return all(worker.label in step.busy_seconds for worker in self._config.workers)

    def _judge(self, measured: MeasuredSteps, steps_left: int) -> Proposal | None:
        if self._settled is None:
            self._num_blocks += 1
            if self._num_blocks < SETTLE_BLOCKS:
                return None
            self._settled = measured
            if self._are_guessed:
                return self._as_found(measured, steps_left)
            return self._correction(measured, steps_left)
        measured = _without_pauses(self._settled, measured)
        ratios = _ratios(self._settled, measured)
        if all(1 / CHANGED < ratio < CHANGED for ratio in ratios.values()):
            self._num_changed = 0
            return None
        self._num_changed += 1
        if self._num_changed < self._patience:
            return None
        self._num_changed = self._num_corrections = 0
        proposal = self._propose(ratios, measured, steps_left)
        if proposal is None:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        return proposal

    def _correction(self, measured: MeasuredSteps, steps_left: int) -> Proposal | None:
        """Return the balance before, or a further one, if it is faster on the hosts as they are."""
        before, self._before = self._before, None
        if before is None:
            self._patience = PATIENCE
            return None
        back = self._way_back(before, measured, steps_left)
        further = None
        if self._num_corrections < MOST_CORRECTIONS:
            further = self._as_found(measured, steps_left)
        self._num_corrections += 1
        if back is None or (further is not None and further.step_s < back.step_s):
            self._patience = PATIENCE
            return further
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        self.refused.append(self._balance)
        self._proposed = None  # it has been judged
        return back

    def _way_back(
        self, before: list[int], measured: MeasuredSteps, steps_left: int
    ) -> Proposal | None:
        if before in self.refused:
            return None
        now = Forecast(self.hosts, self._balance).corrected(self._config, measured)
        # In proportion: the hosts may be other ones than when these layers were measured.
        other = now.better(self._config, before, ways=[True])
        if (after_s := self._gains(now, other, measured, steps_left)) is None:
            return None
        takes = f"steps take {_ms(measured.step_s)}, and {_ms(after_s)} as they were before"
        return Proposal(before, takes, after_s)

    @property
    def hosts(self) -> list[StageHost]:
        """The hosts of the stages, as far as they are known."""
        if self._hosts or self._settled is None:
            return self._hosts
        return self._estimated(self._settled)

    def _as_found(self, measured: MeasuredSteps, steps_left: int) -> Proposal | None:
        """Return the balance for hosts that have turned out to have other speeds than expected."""
        self._are_guessed = False
        ratios = {}
        for host, part in zip(self.hosts, bounds(self._balance), strict=True):
            taken = sum(measured.busy[host.stage].values())
            ratios[host.stage] = max(taken, 1e-9) / max(host.seconds(*part), 1e-9)
        return self._propose(ratios, measured, steps_left)

    def _gains(
        self, now: Forecast, other: Forecast, measured: MeasuredSteps, steps_left: int
    ) -> float | None:
        """Return the seconds of a step under another balance, if that saves more than it costs."""
        before_s, after_s = (each.predict(self._config).step_s for each in (now, other))
        steps = min(steps_left, self._config.rebalance_within)
        is_waiting = measured.data_share > MOST_WAITING
        is_worth = steps * (before_s - after_s) > self._cost_s
        return after_s if other is not now and is_worth and not is_waiting else None

    def _propose(
        self, ratios: Mapping[str, float], measured: MeasuredSteps, steps_left: int
    ) -> Proposal | None:
        hosts = [
            replace(host, profile=host.profile.scaled(ratios[host.stage])) for host in self.hosts
        ]
        now = Forecast(hosts, self._balance).corrected(self._config, measured)
        other = now.improved(self._config)
        if other.balance in self.refused or self._may_not_fit(other.balance):
            return None
        if (after_s := self._gains(now, other, measured, steps_left)) is None:
            return None
        self._hosts_by_proposal, self._proposed = hosts, other.balance
        stage, ratio = max(ratios.items(), key=lambda item: abs(math.log(item[1])))
        then = "was expected" if measured is self._settled else "did"
        return Proposal(
            other.balance,
            f"stage {stage!r} computes {ratio:.2f} times as long as it {then}; a step of "
            f"{_ms(measured.step_s)} would take {_ms(after_s)}",
            after_s,
        )

    def _may_not_fit(self, balance: list[int]) -> bool:
        """Return whether a stage with limited memory would get layers of unknown sizes."""
        # There are no [[stages]] if they need nothing but their numbers of layers.
        stages = zip(self._config.stages, self._balance, balance, strict=False)
        return not self._knows_layers and any(
            stage.memory is not None and after > before for stage, before, after in stages
        )

    def _estimated(self, settled: MeasuredSteps) -> list[StageHost]:
        """Return hosts that are equally fast, with layers as fast as the others of their stages."""
        known = Calibration.fit(self._config, settled)
        layers = []
        for stage, count in zip(self._config.stage_names, self._balance, strict=True):
            forward, backward, weight = known.times[stage].scaled(1 / count)
            layer = LayerProfile(
                forward_s=forward,
                backward_s=backward,
                weight_s=weight,
                update_s=known.updates[stage] / count,
                state_bytes=0,
                activation_bytes=0,
                input_bytes=0,
            )
            layers += count * [layer]
        profile = HostProfile(layers=layers, base_bytes=0, available_bytes=None)
        count = self._config.num_microbatches
        return [StageHost(name, profile, None, count, 1) for name in self._config.stage_names]


def _without_pauses(settled: MeasuredSteps, now: MeasuredSteps) -> MeasuredSteps:
    """Return the steps without the speed that stages have gained by waiting for a slower one.

    A processor with a limit, or a hot one, is faster in between pauses; it would not be with more
    layers.
    """
    if now.step_s < CHANGED * settled.step_s:
        return now
    busy = {
        stage: settled.busy[stage] if ratio < 1 else now.busy[stage]
        for stage, ratio in _ratios(settled, now).items()
    }
    return now._replace(busy=busy)


def _ratios(settled: MeasuredSteps, now: MeasuredSteps) -> dict[str, float]:
    """Return how many times as long each stage computes."""
    return {
        stage: max(sum(kinds.values()), 1e-9) / max(sum(settled.busy[stage].values()), 1e-9)
        for stage, kinds in now.busy.items()
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
