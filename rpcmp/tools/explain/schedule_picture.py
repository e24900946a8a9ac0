"""The schedule of one step as text: a row per stage, time to the right. Pure.

    0 stage0  F0 F1 F2       B0 F3 B1
    1 stage1     F0 F1    B0 F2 B1 F3
    2 stage2        F0 B0 F1 B1 F2 B2

Columns are moments: an action extends from the column of its start to the column of its end, so
actions below each other happen at the same time. If actions are too short for their names to scale,
time is stretched there, for all rows alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rpcmp.pipelining.simulation import SimulatedRun

LONGEST = 8
"""Most blocks of rows in a picture; JSON has all of it."""


def picture(
    runs: Mapping[str, Sequence[SimulatedRun]], names: Sequence[str], width: int
) -> list[str]:
    """Return the lines of a picture; a step that is wider than `width` is cut into blocks.

    Args:
        runs: the actions of each stage, in order.
        names: of the stages, in the config's order, by which they are numbered.
    """
    heads = [f"{index} {name}" for index, name in enumerate(names)]
    indent = max(map(len, heads)) + 2
    room = max(20, width - indent)
    columns = _columns(runs, room)
    blocks = list(_blocks([_row(runs[name], columns) for name in names], room))
    lines: list[str] = []
    for rows in blocks[:LONGEST]:
        lines += [""] if lines else []
        pairs = zip(heads, rows, strict=True)
        lines += [f"{head:{indent}}{row}".rstrip() for head, row in pairs]
    if len(blocks) > LONGEST:
        lines += ["", f"... and {len(blocks) - LONGEST} such blocks more, which --json has"]
    return lines


def label(run: SimulatedRun) -> str:
    """Return the name of an action in its stage's row, such as "F0"."""
    return f"{run.action}{run.microbatch}"


def actions(
    runs: Mapping[str, Sequence[SimulatedRun]], names: Sequence[str]
) -> dict[str, list[str]]:
    """Return the actions of each stage, in order, with the stage's number: "2F0"."""
    return {
        name: [f"{index}{label(run)}" for run in runs[name]] for index, name in enumerate(names)
    }


def _blocks(rows: list[str], room: int) -> Iterator[list[str]]:
    """Cut the rows into pieces of at most `room` columns, between actions if possible."""
    length = max(map(len, rows), default=0)
    start = 0
    while start < length:
        ends = range(min(start + room, length), start, -1)
        whole = (end for end in ends if not any(_cuts_action(row, end) for row in rows))
        end = next(whole, ends[0])
        yield [row[start:end] for row in rows]
        start = end


def _cuts_action(row: str, end: int) -> bool:
    return not row[end - 1 : end].isspace() and bool(row[end : end + 1].strip())


def _row(runs: Sequence[SimulatedRun], columns: Mapping[int, int]) -> str:
    row = ""
    for run in runs:
        row = (row and f"{row} ").ljust(columns[_ns(run.start)]) + label(run)
    return row


def _columns(runs: Mapping[str, Sequence[SimulatedRun]], room: int) -> dict[int, int]:
    """Return the column of each moment, so that a step fills a line if it fits into one.

    Moments are to scale unless an action would be too narrow for its name.
    """
    narrowest = _stretched(runs, 0.0)
    last = max(narrowest, default=0)
    left = room - narrowest.get(last, 0)
    return _stretched(runs, left / last) if last and left > 0 else narrowest


def _stretched(runs: Mapping[str, Sequence[SimulatedRun]], scale: float) -> dict[int, int]:
    """Return the column of each moment: `scale` columns per nanosecond, or more for names."""
    every = [run for done in runs.values() for run in done]
    moments = sorted({moment for run in every for moment in (_ns(run.start), _ns(run.end))})
    ending: dict[int, list[SimulatedRun]] = {}
    for run in every:
        ending.setdefault(_ns(run.end), []).append(run)
    columns: dict[int, int] = {}
    before, column = 0, 0.0
    for moment in moments:
        column += (moment - before) * scale
        needed = [
            columns[_ns(run.start)] + len(label(run)) + 1
            for run in ending.get(moment, ())
            if _ns(run.start) < moment
        ]
        column = max(column, *needed) if needed else column
        columns[moment] = int(column)
        before = moment
    return columns


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
