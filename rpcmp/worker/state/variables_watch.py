"""Watch variables that code of several stages reaches: each process has its own.

    calls += 1                          changes with each step: refused if another stage reads it
    if SCALE is None:                   filled in, by each stage from its own samples: refused where
        SCALE = x.abs().mean()          what two stages hold is not equal
    TABLE = torch.randn(4)              made as a file is imported: refused where it is not equal

A stage reports after a step what it has of them, and the driver compares.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.rpc.messages import StepReport, VariableUse
from rpcmp.worker.state.forward_state import is_filled_in
from rpcmp.worker.state.places import Modules, Objects, outer_places, parts_of, places_within
from rpcmp.worker.state.values import content_of, is_equal, plain_of

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

    Attributes:
        matters: whether the stage's outputs may depend on what it changes.
    """

    def __init__(self, modules: Modules, objects: Objects = (), shared: Objects = ()) -> None:
        self._parts, self._objects, self._steps = parts_of(modules), objects, 0
        self._shared = shared
        self._built = self._before = self._contents()
        self._moving = set[str]()
        self._of_loss = {each.name for each in outer_places((), objects)}
        self.matters = True

    def have_moved(self) -> bool:
        """Whether one is another than when the stage was built."""
        return any(
            name in self._before and not is_filled_in(self._before[name], now)
            for name, now in self._contents().items()
        )

    def after_step(self) -> dict[str, VariableUse] | None:
        """Return by name what has become of each since the last look; None if this step has none.

        Each of the first steps is looked at, and then one of twice as many, and so on.
        """
        self._steps += 1
        if self._steps > LOOKED_AT and self._steps.bit_count() > 1:
            return None
        before, self._before = self._before, self._contents()
        return {name: self._use(name, before, now) for name, now in self._before.items()}

    def _use(self, name: str, before: Mapping[str, Any], now: Any) -> VariableUse:
        change = self._change(name, before, now)
        if change:
            self._moving.add(name)  # what it holds is its stage's own
        content = {} if name in self._moving else dict(_summaries(now))
        is_filled = not is_equal(self._built.get(name), now)
        return VariableUse("" if self._steps == 1 else change, is_filled, content)

    def _change(self, name: str, before: Mapping[str, Any], now: Any) -> str:
        if name not in before or is_filled_in(before[name], now):
            return ""
        return CHANGED if self.matters or name in self._of_loss else COUNTED

    def _contents(self) -> dict[str, Any]:
        found = {}
        of_both = (each for name, value in self._shared for each in places_within(name, value))
        for each in (*outer_places(self._parts, self._objects), *of_both):
            value = each.owner.get(each.key)
            found[each.name] = (
                dict.fromkeys(value) if isinstance(value, set) else plain_of(content_of(value))
            )
        return found


def _summaries(content: Any) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield how many numbers there are, their sum, and that of their sizes; of a dict by key."""
    if not isinstance(content, dict):
        content = {"": content}
    for key, value in [*content.items()][:MOST_KEYS]:
        if numbers := [each for each in _numbers(value) if each.numel()]:
            sums = (
                (float(each.sum()), float(each.abs().sum()))
                for each in (each.detach().to_dense().double() for each in numbers)
            )
            count = sum(each.numel() for each in numbers)
            yield str(key)[:100], (float(count), *map(sum, zip(*sums, strict=True)))


def _numbers(value: Any) -> Iterator[Tensor]:
    match value:
        case bool():
            return
        case int() | float() if abs(value) < 1e300:
            yield torch.tensor([float(value)])
        case numpy.ndarray() if value.dtype.kind in "iuf":
            yield torch.from_numpy(value.astype(float))
        case Tensor() if not (value.dtype is torch.bool or value.is_complex() or value.is_meta):
            yield value if not value.is_quantized else value.dequantize()
        case Tensor() if value.is_complex():
            yield torch.view_as_real(value)
        case list() | tuple() | deque():
            for each in value:
                yield from _numbers(each)


def require_not_shared(reports: Mapping[str, StepReport]) -> None:
    """Check that no stage reaches a variable that another one changes, or has otherwise.

    Args:
        reports: of a step, by stage.

    A mere count in all of them, on which no output depends, may be for a log: a warning. So is a
    number that each process has had from the start, such as a time.

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
        log.warning("%s counts in each stage by itself, with each forward", name)
        return
    raise ConfigError(
        f"the stages {stage!r} and {next(iter(others))!r} both use {name!r}, which changes with "
        f"each step: {WAY_OUT}"
    )


def _require_equal(
    name: str, stages: tuple[str, str], use: VariableUse, theirs: VariableUse
) -> None:
    both = use.content.keys() & theirs.content.keys()
    apart = sorted(key for key in both if not _is_close(use.content[key], theirs.content[key]))
    is_filled = use.is_filled or theirs.is_filled
    if not apart:
        numbers = [each[0] == 1 for each in (*use.content.values(), *theirs.content.values())]
        if is_filled and use.content.keys() != theirs.content.keys() and all(numbers):
            log.warning("%s: each of the stages %r and %r fills in its own values", name, *stages)
        return
    where = f"{name}[{apart[0]}]" if apart[0] else name
    values = (_shown(each.content[apart[0]]) for each in (use, theirs))
    text = (
        f"{where!r} is {{}} in the stage {stages[0]!r} and {{}} in {stages[1]!r}, which both use "
        f"it: {WAY_OUT}"
    ).format(*values)
    is_constant = not is_filled and use.content[apart[0]][0] == 1
    if not is_constant:
        raise ConfigError(text)
    log.warning("%s", text)


def _is_close(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    if one[0] != other[0]:  # tables for other lengths
        return True
    scale = max(abs(one[-1]), abs(other[-1]))  # a sum may be nearly zero
    return all(
        abs(a - b) <= ROUNDING * scale or a == b or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one, other, strict=True)
    )


def _shown(summary: tuple[float, ...]) -> str:
    count, total, _ = summary
    return f"{total:.6g}" if count == 1 else f"{count:.0f} numbers with the sum {total:.6g}"
