"""Write a config with the hosts of a plan, and keep the user's text and comments where possible.

Tables are replaced in the text. If that would not give exactly the planned config, as with inline
tables, dotted keys or overrides, all of it is written anew.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

FORMER = re.compile(r"# Planned by `rpcmp plan` ")
"""Begins what an earlier plan has put at the top."""

BARE = re.compile(r"[A-Za-z0-9_-]+")

Block = list[str]
"""The lines of a table, its header first; the first block has the keys above all tables."""


def planned(
    data: Mapping[str, Any],
    balance: Sequence[int],
    stages: Sequence[Mapping[str, Any]],
    spares: Sequence[str],
) -> dict[str, Any]:
    """Return the data of a config with these stages instead of its own."""
    found = copy.deepcopy(dict(data))
    found["model"] = {key: v for key, v in found["model"].items() if key != "num_stages"}
    found["model"]["balance"] = list(balance)
    found["stages"] = [dict(stage) for stage in stages]
    servers = [address for stage in stages for address in stage["addresses"]]
    found["planned_for"] = [*servers, *spares]
    recovery = {key: v for key, v in found.pop("recovery", {}).items() if key != "spares"}
    if recovery or spares or "recovery" in data:
        found["recovery"] = recovery | ({"spares": list(spares)} if spares else {})
    return found


def written(text: str, data: Mapping[str, Any], comment: str) -> str:
    """Return TOML of `data`: the user's `text` where its tables need not change.

    Args:
        data: from `planned`.
        comment: put at the top, a line each.
    """
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    # Not `splitlines`, which ends lines at characters that TOML allows in comments.
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if not FORMER.match(line)]
    while lines and not lines[-1]:
        lines.pop()
    edited = head + "\n".join(_edited(lines, data)) + "\n"
    try:
        if tomllib.loads(edited) == data:
            return edited
    except tomllib.TOMLDecodeError:
        pass
    return head + "\n".join(_lines(data)) + "\n"


def _edited(lines: Sequence[str], data: Mapping[str, Any]) -> Iterator[str]:
    blocks: list[Block] = [[]]
    for line in lines:
        if re.match(r"\s*\[", line) and not _is_within_value(blocks[-1]):
            blocks.append([])
        blocks[-1].append(line)
    top, *tables = blocks
    known = [_name(block) for block in tables]
    if "name" in data and not any(re.match(r"\s*name\s*=", line) for line in top):
        yield f"name = {_value(data['name'])}"
    yield from _with_values(["", *top], {"planned_for": data["planned_for"]})
    for name, following, block in zip(known, [*known[1:], ""], tables, strict=False):
        if name == "model":
            values = {"balance": data["model"]["balance"], "num_stages": None}
            yield from _with_values(block, values)
        elif name == "recovery":
            yield from _with_values(block, {"spares": data.get("recovery", {}).get("spares")})
        elif name.partition(".")[0] != "stages":
            yield from block
        elif not following.startswith("stages"):  # what is said of the table after it
            yield from _trailing_comments(block)
    if "recovery" in data and "recovery" not in known:
        yield from ("", *_table(["recovery"], data["recovery"]))
    yield from _lines({"stages": data["stages"]})


def _trailing_comments(block: Block) -> Block:
    count = len(block)
    while count > 1 and (not block[count - 1].strip() or block[count - 1].lstrip().startswith("#")):
        count -= 1
    return block[count:]


def _name(block: Block) -> str:
    return block[0].partition("#")[0].strip().strip("[]").strip()


def _is_within_value(block: Block) -> bool:
    """Return whether the last line of a block continues in the next one."""
    try:
        tomllib.loads("\n".join(block))
    except tomllib.TOMLDecodeError:
        return True
    return False


def _with_values(block: Block, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table with other values; a key whose value is None is left out."""
    yield from filter(None, block[:1])
    for key, value in values.items():
        if value is not None:
            yield f"{key} = {_value(value)}"
    statement: Block = []
    for line in block[1:]:
        statement.append(line)
        if not _is_within_value(statement):
            if not any(re.match(rf"\s*{key}\s*=", statement[0]) for key in values):
                yield from statement
            statement = []
    yield from statement


def _lines(data: Mapping[str, Any], path: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of tables and arrays of tables, below their parents' plain values."""
    yield from (f"{_key(k)} = {_value(v)}" for k, v in data.items() if not _has_header(v))
    for key, value in data.items():
        if not _has_header(value):
            continue
        if isinstance(value, dict):
            yield from ("", *_table([*path, key], value))
        else:
            for each in value:
                yield from ("", f"[[{'.'.join(map(_key, [*path, key]))}]]")
                yield from _lines(each, [*path, key])


def _table(path: Sequence[str], data: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{'.'.join(map(_key, path))}]"
    yield from _lines(data, path)


def _has_header(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, dict) for each in value)
    return isinstance(value, dict)


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    match value:
        case dict():
            return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())} }}"
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            return str(value).lower()
        case datetime() | date() | time():
            return value.isoformat()
        case _:
            return repr(value)
