"""Watch variables that code of several stages reaches: each process has its own.

    calls += 1                          changes with each step: refused if another stage reads it
    if SCALE is None:                   filled in from samples: refused where another stage reads
        SCALE = x.abs().mean()          it, unless it is for a log in both
    TABLE = torch.randn(4)              made as a file is imported: refused where it is not equal

A stage reports after a step what it has of them, and the driver compares.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.rpc.messages import StepReport, VariableUse
from rpcmp.worker.state.forward_state import is_filled_in
from rpcmp.worker.state.outer_variables import StatePlace
from rpcmp.worker.state.places import Modules, Objects, outer_places, parts_of, shared_places
from rpcmp.worker.state.values import as_numbers, content_of, is_equal, plain_of

log = logging.getLogger(__name__)

CHANGED, COUNTED = "changed", "counted"
"""What a stage has done to a variable; counted: its outputs do not depend on it."""

LOOKED_AT = 8
"""First steps that are all looked at."""

MOST_KEYS = 100
"""Keys of a dict that are compared."""

ROUNDING = 1e-3
"""How far what two stages hold may be apart, relatively: machines round sines in their own way."""


class VariablesWatch:
    """Tells after some steps which variables outside of modules a stage's code changes.

    What is only filled in, as a cache is, has not changed. The first step fills in.

    Args:
        shared: objects that layers of this stage and of others get; each process has its own.
    """

    def __init__(self, modules: Modules, objects: Objects = (), shared: Objects = ()) -> None:
        self._parts, self._objects, self._steps = parts_of(modules), objects, 0
        self._shared = shared
        self._built = self._before = _contents(self._places())
        self._moving, self._of_samples = set[str](), set[Any]()
        self._of_loss = {each.name for each in outer_places((), objects)}
        self._matters = self._carries = True

    def learn(self, of_samples: Iterable[StatePlace], matters: bool, carries: bool) -> None:
        """Note what a trial has shown; see `rpcmp.worker.checks.second_forward`.

        Args:
            of_samples: what is filled in from samples.
            matters: whether outputs depend on what moves.
            carries: whether they depend on what is filled in.
        """
        for place in of_samples:
            self._of_samples |= _keys_of(place)
        self._matters, self._carries = matters, carries

    def after_step(self) -> dict[str, VariableUse] | None:
        """Return by name what has become of each since the last look; None if this step has none.

        Each of the first steps is looked at, and then one of twice as many, and so on.
        """
        self._steps += 1
        if self._steps > LOOKED_AT and self._steps.bit_count() > 1:
            return None
        places, before = self._places(), self._before
        self._before = _contents(places)
        return {each.name: self._use(each, before, self._before[each.name]) for each in places}

    def _use(self, place: StatePlace, before: Mapping[str, Any], now: Any) -> VariableUse:
        name = place.name
        change = self._change(name, before, now)
        if change:
            self._moving.add(name)  # what it holds is its stage's own
        is_moving = name in self._moving
        is_filled = not is_equal(self._built.get(name), now)
        return VariableUse(
            "" if self._steps == 1 else change,
            is_filled,
            {} if is_moving else dict(_summaries(now, is_filled)),
            not is_moving and not self._of_samples.isdisjoint(_keys_of(place)),
            self._carries,
            _has_tensors(now),
        )

    def _change(self, name: str, before: Mapping[str, Any], now: Any) -> str:
        if name not in before or is_filled_in(before[name], now):
            return ""
        return CHANGED if self._matters or name in self._of_loss else COUNTED

    def _places(self) -> list[StatePlace]:
        of_both = (each for name, value in self._shared for each in shared_places(name, value))
        return [*outer_places(self._parts, self._objects), *of_both]


def _contents(places: Iterable[StatePlace]) -> dict[str, Any]:
    found = {}
    for each in places:
        value = each.owner.get(each.key)
        found[each.name] = (
            dict.fromkeys(value) if isinstance(value, set) else plain_of(content_of(value))
        )
    return found


def _keys_of(place: StatePlace) -> set[Any]:
    """Return what tells a place, and a container in it, which others may have as well."""
    value = place.owner.get(place.key)
    return {place.id, id(value)} if isinstance(value, list | dict | set) else {place.id}


def _summaries(content: Any, is_filled: bool) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield how many numbers there are, and three sums of them; of a dict by key.

    Args:
        is_filled: whether texts count; those of a file may be paths and names of the host.
    """
    if not isinstance(content, dict):
        content = {"": content}
    for key, value in [*content.items()][:MOST_KEYS]:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # jagged, for one
            numbers = [each.detach() for each in _numbers(value, is_filled)]
            count = sum(each.numel() for each in numbers)
            if count:
                sums = zip(*map(_sums, filter(Tensor.numel, numbers)), strict=True)
                yield str(key)[:100], (float(count), *map(sum, sums))


def _sums(tensor: Tensor) -> tuple[float, float, float]:
    """Return the sum of all, of their sizes, and one that depends on the order."""
    flat = tensor.flatten()
    flat = flat[:: flat.numel() // SUMMED + 1].double().nan_to_num(3.0, 2.0, -2.0)
    weights = torch.arange(len(flat), dtype=torch.double, device=flat.device).add_(1).sin_()
    return float(flat.sum()), float(flat.abs().sum()), float(flat @ weights)


SUMMED = 2**20
"""Numbers of a table that are summed up, out of all of it."""


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple | deque | dict):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor | numpy.ndarray)


def _numbers(value: Any, with_texts: bool) -> Iterator[Tensor]:
    match value:
        case str() if with_texts:
            yield torch.tensor([float(zlib.crc32(value.encode(errors="replace")))])
        case int() | float() if abs(value) < 1e300:  # bool as well
            yield torch.tensor([float(value)])
        case numpy.ndarray() | numpy.generic() if value.dtype.kind in "iufb":
            yield torch.from_numpy(numpy.asarray(value, dtype=float))
        case Tensor() if not value.is_meta:
            yield as_numbers(value)
        case list() | tuple() | deque():
            for each in value:
                yield from _numbers(each, with_texts)
        case dict():
            for each in value.values():
                yield from _numbers(each, with_texts)


def require_not_shared(reports: Mapping[str, StepReport]) -> None:
    """Check that no stage reaches a variable that another one changes, or has otherwise.

    Args:
        reports: of a step, by stage.

    A mere count in all of them, on which no output depends, may be for a log: a warning. So are
    numbers that each process has had from the start, such as a time or the number of its stage.

    Raises:
        ConfigError: one does.
    """
    found = {stage: report.variables for stage, report in reports.items() if report.variables}
    for stage, variables in found.items():
        for name, use in variables.items():
            others = {
                each: theirs[name]
                for each, theirs in found.items()
                if each != stage and name in theirs
            }
            if use.change and others:
                _require_not_changed(name, stage, use, others)
            for other, theirs in others.items():
                if stage < other:
                    _require_equal(name, (stage, other), use, theirs)


WAY_OUT = (
    "each process has its own, and so another than one process would have: let layers of one stage "
    "use it, and return what others need"
)


def _require_not_changed(
    name: str, stage: str, use: VariableUse, others: Mapping[str, VariableUse]
) -> None:
    if all(each.change == COUNTED for each in (use, *others.values())):
        _tell(f"{name} counts in each stage by itself, with each forward")
        return
    raise ConfigError(
        f"the stages {stage!r} and {next(iter(others))!r} both use {name!r}, which changes with "
        f"each step: {WAY_OUT}"
    )


def _require_equal(
    name: str, stages: tuple[str, str], use: VariableUse, theirs: VariableUse
) -> None:
    if use.of_samples or theirs.of_samples:
        is_of_both = use.of_samples and theirs.of_samples
        if use.content == theirs.content or (is_of_both and not (use.carries or theirs.carries)):
            return  # such as a time or a last activation, for a log
        raise ConfigError(
            f"the stages {stages[0]!r} and {stages[1]!r} both use {name!r}, which is filled in "
            f"from samples: {WAY_OUT}"
        )
    both = use.content.keys() & theirs.content.keys()
    apart = sorted(key for key in both if not _is_close(use.content[key], theirs.content[key]))
    is_filled = use.is_filled or theirs.is_filled
    if not apart:
        numbers = [each[0] == 1 for each in (*use.content.values(), *theirs.content.values())]
        if is_filled and use.content.keys() != theirs.content.keys() and all(numbers):
            both_stages = f"the stages {stages[0]!r} and {stages[1]!r}"
            _tell(f"{name}: each of {both_stages} fills in values of its own")
        return
    where = f"{name}[{apart[0]}]" if apart[0] else name
    one, other = (_shown(each.content[apart[0]]) for each in (use, theirs))
    text = (
        f"{where!r} is {one} in the stage {stages[0]!r} and {other} in {stages[1]!r}, which both "
        f"use it: {WAY_OUT}"
    )
    if is_filled or use.has_tensors or theirs.has_tensors:
        raise ConfigError(text)
    _tell(text)


@functools.cache
def _tell(text: str) -> None:
    """Warn once: stages report this with each look."""
    log.warning("%s", text)


def _is_close(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    if one[0] != other[0]:  # tables for other lengths
        return True
    scale = max(one[2], other[2])  # a sum may be nearly zero
    return all(abs(a - b) <= ROUNDING * scale for a, b in zip(one, other, strict=True))


def _shown(summary: tuple[float, ...]) -> str:
    count, total, *_ = summary
    return f"{total:.6g}" if count == 1 else f"{count:.0f} numbers with the sum {total:.6g}"
