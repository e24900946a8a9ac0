"""The schedule of one step as text: a row a stage, time to the right. Pure.

    0 stage0  F0 F1 F2       B0 F3 B1
    1 stage1     F0 F1    B0 F2 B1 F3
    2 stage2        F0 B0 F1 B1 F2 B2

Columns are moments: an action begins in the column of its start and has room until that of its end,
so what stands below each other happens at the same time. Where actions are too short to be written
out to scale time is stretched there, for all rows alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rpcmp.simulation import Run

LONGEST = 8
"""Blocks of rows that a picture has at most; JSON has all of it."""


def picture(runs: Mapping[str, Sequence[Run]], names: Sequence[str], width: int) -> list[str]:
    """The rows, in blocks one below the other where a step is wider than `width`.

    Args:
        runs: what each stage does, in order.
        names: of the stages, in the config's order, which their numbers are of.
        width: characters of a line.
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


def label(run: Run) -> str:
    """An action in its stage's row, "F0"."""
    return f"{run.action}{run.microbatch}"


def actions(runs: Mapping[str, Sequence[Run]], names: Sequence[str]) -> dict[str, list[str]]:
    """What each stage does, in order, each action with its stage's number: "2F0"."""
    return {
        name: [f"{index}{label(run)}" for run in runs[name]] for index, name in enumerate(names)
    }


def _blocks(rows: list[str], room: int) -> Iterator[list[str]]:
    """The rows in pieces of at most `room` columns that end within no row's action."""
    length = max(map(len, rows), default=0)
    begin = 0
    while begin < length:
        ends = range(min(begin + room, length), begin, -1)
        whole = (end for end in ends if not any(_cuts(row, end) for row in rows))
        end = next(whole, ends[0])
        yield [row[begin:end] for row in rows]
        begin = end


def _cuts(row: str, end: int) -> bool:
    """Whether what ends there has only a part of an action."""
    return not row[end - 1 : end].isspace() and bool(row[end : end + 1].strip())


def _row(runs: Sequence[Run], columns: Mapping[int, int]) -> str:
    row = ""
    for run in runs:
        row = (row and f"{row} ").ljust(columns[_ns(run.start)]) + label(run)
    return row


def _columns(runs: Mapping[str, Sequence[Run]], room: int) -> dict[int, int]:
    """The column of each moment: to scale, but for what would be too narrow for its actions.

    Scaled so that a step fills a line, where it needs no more than that.
    """
    narrowest = _stretched(runs, 0.0)
    last = max(narrowest, default=0)
    left = room - narrowest.get(last, 0)
    return _stretched(runs, left / last) if last and left > 0 else narrowest


def _stretched(runs: Mapping[str, Sequence[Run]], scale: float) -> dict[int, int]:
    """The column of each moment, `scale` columns a nanosecond where there is room for that."""
    every = [run for done in runs.values() for run in done]
    moments = sorted({moment for run in every for moment in (_ns(run.start), _ns(run.end))})
    ending: dict[int, list[Run]] = {}
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
