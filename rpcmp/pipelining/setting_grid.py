"""The schedule options that are worth measuring, by `rpcmp tune` or by a run. Pure.

Options under which every stage does the same are measured once. What a mini-batch or a limit makes
useless is left out, with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from pydantic import ValidationError

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import cost_model, simulation
from rpcmp.pipelining.schedule import policy

SETTLE_STEPS = 1
"""Steps after a change before the clock counts: memory of other sizes, new threads, a pipeline that
was empty."""

FASTER = 0.97
"""What a step must take at most, in times of that under other options, to be called faster."""

MEMORY_SHARE = 0.25
"""The part of a device's free memory that options other than the config's own may take in all."""

MOST_MICROBATCHES = 128
MOST_PER_MESSAGE = 16

SCHEDULES = ("1f1b", "zero-bubble")
"""Defaults of a sweep."""


class Axes(NamedTuple):
    """Values to sweep; None: the default.

    Attributes:
        num_microbatches: by default powers of two, as long as each micro-batch has two samples,
            the least for batch normalization.
        schedules: names of policies.
        max_in_flight: numbers, and None for the schedule's own. By default None, and for
            zero-bubble also the largest useful number: twice the longest path through the graph,
            times the micro-batches of a message.
        microbatches_per_message: by default what the config starts with.
    """

    num_microbatches: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    max_in_flight: Sequence[int | None] | None = None
    microbatches_per_message: Sequence[int] | None = None


class Grid(NamedTuple):
    """The settings to measure: the config's own, and all of them with it.

    Attributes:
        left_out: lines about settings that are not worth measuring, one for all numbers of
            micro-batches with the same other options and the same reason.
    """

    own: ScheduleOptions
    settings: list[ScheduleOptions]
    left_out: list[str]


def grid(config: Config, axes: Axes) -> Grid:
    """Combine the values of all axes, and add the config's own setting."""
    return _grid(config, axes, config.require_data("tuning").batch_size)


def _grid(config: Config, axes: Axes, batch_size: int) -> Grid:
    own = config.options
    settings: dict[Hashable, ScheduleOptions] = {_effect(config, own): own}
    left_out: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for setting in dict.fromkeys(_product(config, axes, batch_size)):
        if setting == own:
            continue
        reason = _why_useless(setting, batch_size)
        if not reason:
            same = settings.setdefault(_effect(config, setting), setting)
            reason = "" if same is setting else f"the same as {same.without_count}"
        if reason:
            left_out[setting.without_count, reason].append(setting.num_microbatches)
    lines = [
        f"left out: num_microbatches {', '.join(map(str, numbers))}, {way}: {reason}"
        for (way, reason), numbers in left_out.items()
    ]
    return Grid(own, sorted(settings.values(), key=_sort_key), lines)


def options_to_try(config: Config) -> list[ScheduleOptions]:
    """Return what a run may change to without another result; first the config's own.

    Larger messages give each replica other micro-batches, whose gradients are then summed in
    another order, so with replicas they stay as they are.
    """
    own = config.options
    if config.data is None:  # it is a program's job, which has other steps than these
        return [own]
    messages = [own.microbatches_per_message]
    if config.microbatches_per_message == "auto" and not config.is_replicated:
        powers_of_two = (1 << exponent for exponent in range(MOST_PER_MESSAGE.bit_length()))
        messages = [size for size in powers_of_two if size <= own.num_microbatches]
    axes = Axes(
        num_microbatches=[own.num_microbatches],
        schedules=SCHEDULES if config.schedule == "auto" else [own.schedule],
        max_in_flight=None if config.max_in_flight == "auto" else [own.max_in_flight],
        microbatches_per_message=messages,
    )
    found = _grid(config, axes, max(config.data.batch_size, own.num_microbatches)).settings
    return [own, *(setting for setting in found if setting != own)]


def _product(config: Config, axes: Axes, batch_size: int) -> Iterator[ScheduleOptions]:
    most = min(MOST_MICROBATCHES, max(1, batch_size // 2))
    powers_of_two = [1 << exponent for exponent in range(most.bit_length())]
    numbers = powers_of_two if axes.num_microbatches is None else axes.num_microbatches
    messages = axes.microbatches_per_message or [config.options.microbatches_per_message]
    replicas = {worker.stage: worker.num_replicas for worker in config.workers}
    longest = max(simulation.depths(config.graph(), replicas).values())
    for schedule, per_message in product(axes.schedules or SCHEDULES, messages):
        policy(schedule)
        in_flight = axes.max_in_flight
        if in_flight is None:
            in_flight = [None, 2 * longest * per_message] if schedule == "zero-bubble" else [None]
        for max_in_flight, number in product(in_flight, numbers):
            yield _setting(
                num_microbatches=number,
                schedule=schedule,
                max_in_flight=max_in_flight,
                microbatches_per_message=per_message,
            )


def _setting(**values: Any) -> ScheduleOptions:
    try:
        return ScheduleOptions.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']} (got {first['input']!r})") from error


def _why_useless(setting: ScheduleOptions, batch_size: int) -> str:
    if setting.num_microbatches > batch_size:
        return f"a mini-batch has {batch_size} samples"
    if setting.schedule == "gpipe" and setting.max_in_flight is not None:
        return "gpipe always holds all micro-batches"
    at_once = min(setting.microbatches_per_message, setting.num_microbatches)
    if setting.max_in_flight is not None and setting.max_in_flight < at_once:
        return f"a message has {at_once} micro-batches"
    return ""


def _effect(config: Config, setting: ScheduleOptions) -> Hashable:
    """Return a key that is equal for settings under which every stage does the same."""
    changed = setting.on(config)
    count = changed.num_full_microbatches
    cut = changed.bundles(count)
    bundles = len(cut)
    stages = [
        (
            min(each.open, bundles),
            min(each.held, bundles),
            each.splits,
            min(each.deferred, bundles - 1),  # after the last backward nothing is deferred
        )
        for each in cost_model.limits(changed).values()
    ]
    return count, setting.schedule, cut, tuple(stages)


def _sort_key(setting: ScheduleOptions) -> tuple[str, int, int, int]:
    way = setting.schedule, setting.microbatches_per_message, setting.max_in_flight or 0
    return *way, setting.num_microbatches
