"""Which settings are measured, and which need not be. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from pydantic import ValidationError

from rpcmp.config.schema import Config, ScheduleOptions
from rpcmp.config.topology import num_bundles
from rpcmp.errors import ConfigError
from rpcmp.pipelining import inflight, simulation
from rpcmp.pipelining.schedule import policy

MOST_MICROBATCHES = 128
"""Of the default sweep."""

SCHEDULES = ("1f1b", "zero-bubble")
"""Of the default sweep."""


class Axes(NamedTuple):
    """What to sweep; None: the default.

    Attributes:
        num_microbatches: by default powers of two, as long as each micro-batch has two samples,
            which is the least that batch normalization takes.
        schedules: names of policies.
        max_in_flight: numbers, and None for the schedule's own; by default that, and for
            zero-bubble also twice the longest way through the graph, the most that is of use,
            times the micro-batches of a message.
        microbatches_per_message: by default the config's.
    """

    num_microbatches: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    max_in_flight: Sequence[int | None] | None = None
    microbatches_per_message: Sequence[int] | None = None


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Attributes:
        own: the config's setting, with which all others are compared.
        settings: all, `own` among them.
        left_out: why not, and for which numbers of micro-batches, by `Setting.way`.
    """

    own: ScheduleOptions
    settings: list[ScheduleOptions]
    left_out: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def notes(self) -> Iterator[str]:
        """A line for all that is left out for the same reason."""
        for (way, why), numbers in self.left_out.items():
            yield f"left out: num_microbatches {', '.join(map(str, numbers))}, {way}: {why}"


def grid(config: Config, axes: Axes) -> Grid:
    """The settings of all axes and the config's own, each once.

    Raises:
        ConfigError: the config has no data, or a value is none that a config could have.
    """
    batch_size = config.require_data("tuning").batch_size
    own = ScheduleOptions.of(config)
    kept: dict[Hashable, ScheduleOptions] = {_effect(config, own): own}
    left_out: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for setting in dict.fromkeys(_product(config, axes)):
        if setting == own:
            continue
        why = _nonsense(setting, batch_size)
        if not why:
            same = kept.setdefault(_effect(config, setting), setting)
            why = "" if same is setting else f"the same as {same.way}"
        if why:
            left_out[setting.way, why].append(setting.num_microbatches)
    return Grid(own, sorted(kept.values(), key=_place), dict(left_out))


def _product(config: Config, axes: Axes) -> Iterator[ScheduleOptions]:
    batch_size = config.data.batch_size if config.data else 1
    numbers = _powers_of_two(batch_size) if axes.num_microbatches is None else axes.num_microbatches
    messages = axes.microbatches_per_message or [config.microbatches_per_message]
    for schedule, per_message in product(axes.schedules or SCHEDULES, messages):
        policy(schedule)
        in_flight = _in_flight(config, axes, schedule, per_message)
        for most, number in product(in_flight, numbers):
            yield _setting(
                num_microbatches=number,
                schedule=schedule,
                max_in_flight=most,
                microbatches_per_message=per_message,
            )


def _setting(**values: Any) -> ScheduleOptions:
    try:
        return ScheduleOptions.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']} (got {first['input']!r})") from error


def _powers_of_two(batch_size: int) -> list[int]:
    most = min(MOST_MICROBATCHES, max(1, batch_size // 2))
    return [1 << exponent for exponent in range(most.bit_length())]


def _in_flight(config: Config, axes: Axes, schedule: str, per_message: int) -> Sequence[int | None]:
    if axes.max_in_flight is not None:
        return axes.max_in_flight
    replicas = {worker.stage: worker.num_replicas for worker in config.workers}
    longest = max(simulation.depths(config.graph(), replicas).values())
    largest = 2 * longest * per_message
    return [None, largest] if schedule == "zero-bubble" else [None]


def _nonsense(setting: ScheduleOptions, batch_size: int) -> str:
    """Why nobody would want it; empty: somebody may."""
    if setting.num_microbatches > batch_size:
        return f"a mini-batch has {batch_size} samples"
    if setting.schedule == "gpipe" and setting.max_in_flight is not None:
        return "gpipe always holds all micro-batches"
    at_once = min(setting.microbatches_per_message, setting.num_microbatches)
    if setting.max_in_flight is not None and setting.max_in_flight < at_once:
        return f"a message has {at_once} micro-batches"
    return ""


def _effect(config: Config, setting: ScheduleOptions) -> Hashable:
    """Equal for two settings that make every stage do the same."""
    count = setting.on(config).num_full_microbatches
    bundles = num_bundles(count, setting.microbatches_per_message)
    kept = [
        (
            min(each.open, bundles),
            min(each.held, bundles),
            each.splits,
            min(each.deferred, bundles - 1),  # after the last backward nothing is deferred
        )
        for each in inflight.limits(setting.on(config)).values()
    ]
    return count, setting.schedule, bundles, tuple(kept)


def _place(setting: ScheduleOptions) -> tuple[str, int, int, int]:
    way = setting.schedule, setting.microbatches_per_message, setting.max_in_flight or 0
    return *way, setting.num_microbatches
