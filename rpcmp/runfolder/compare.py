"""What several runs have in common, and what not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rpcmp.runfolder.figures import figures
from rpcmp.runfolder.reader import Record
from rpcmp.tablekeys import flat

SHOWN = 8
"""Steps whose losses are shown, spread over all that the runs share."""

Row = tuple[str, list[Any]]
"""A name, and a value for each run; None where a run has none."""


@dataclass(frozen=True)
class Comparison:
    """Of one run or more.

    Attributes:
        names: the runs'.
        figures: how each went.
        settings: the keys of their configs that not all set to the same, in dotted form.
        losses: at some of the steps that all have done, the first and the last among them.
        shared: how many steps all have done.
        first_difference: the first of them at which losses are not the same to the last bit; None:
            they are.
    """

    names: list[str]
    figures: list[Row]
    settings: list[Row]
    losses: list[tuple[int, list[float | None]]]
    shared: int
    first_difference: int | None

    @property
    def verdict(self) -> str:
        """In a sentence, what the losses say of the bits."""
        if not self.shared:
            return "the runs have no step in common"
        if self.first_difference is None:
            return f"the losses of all {self.shared:,} steps in common are the same, bit for bit"
        return (
            f"the losses differ from step {self.first_difference:,} on; steps in common: "
            f"{self.shared:,}"
        )


def compare(runs: Sequence[Record]) -> Comparison:
    """Compare `runs`, at least one."""
    losses = [{event["step"]: event["loss"] for event in run.all("step")} for run in runs]
    shared = sorted(set.intersection(*(set(each) for each in losses)))
    differing = (step for step in shared if len({each[step] for each in losses}) > 1)
    configs = [dict(flat(run.config)) for run in runs]
    return Comparison(
        names=[run.name for run in runs],
        figures=[row for row in _rows([figures(run) for run in runs]) if _tells(row)],
        settings=[row for row in _rows(configs) if any(value != row[1][0] for value in row[1])],
        losses=[(step, [each[step] for each in losses]) for step in _spread(shared)],
        shared=len(shared),
        first_difference=next(differing, None),
    )


def _rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for name in dict.fromkeys(name for run in runs for name in run):
        yield name, [run.get(name) for run in runs]


def _tells(row: Row) -> bool:
    return any(value is not None for value in row[1])


def _spread(steps: Sequence[int]) -> Iterable[int]:
    """Some of the steps, evenly, with both ends."""
    if len(steps) <= SHOWN:
        return steps
    last = len(steps) - 1
    return [steps[index * last // (SHOWN - 1)] for index in range(SHOWN)]
