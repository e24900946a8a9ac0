"""Reading what was kept of a run, however that run ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rpcmp.config.bounded_file import MIB, read_bytes
from rpcmp.errors import ConfigError
from rpcmp.observability import json_lines
from rpcmp.observability.events.definitions import parse
from rpcmp.observability.events.event import Event
from rpcmp.observability.run_folder import writer
from rpcmp.observability.run_folder.writer import RunInfo

MAX_JSON = 16 * MIB
"""Bytes of `run.json` and of `config.json`."""

MAX_TIME = 2.0**53
"""Seconds; no time is that late."""

NAMED = 3
"""Folders that a message names."""


Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        path: of its folder.
        info: of `run.json`.
        config: the job's, see rpcmp.config.hashes.
        events: all that were kept and that this version defines, in order; each has a time.
    """

    path: Path
    info: RunInfo
    config: dict[str, Any]
    events: Sequence[Event]

    @property
    def name(self) -> str:
        """The folder's."""
        return self.path.absolute().name

    def all(self, kind: type[Kind]) -> list[Kind]:
        """The events of a class."""
        return [event for event in self.events if isinstance(event, kind)]


def read(path: Path) -> Record:
    """The run in a folder.

    Raises:
        ConfigError: it is none, is damaged, or was written by a newer rpcmp.
    """
    info = _info(path)
    try:
        config = json.loads(read_bytes(path / writer.CONFIG, MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path / writer.CONFIG, error) from error
    if not isinstance(config, dict):
        raise _damaged(path / writer.CONFIG, "it is not a JSON object")
    files = (_events(path / name) for name in (writer.METRICS, writer.EVENTS))
    # Not merged: a clock that was set back leaves them unsorted.
    events = tuple(sorted(chain(*files), key=lambda event: event.time or 0.0))
    return Record(path, info, config, events)


def _info(path: Path) -> RunInfo:
    file = path / writer.RUN
    try:
        data = json.loads(read_bytes(file, MAX_JSON))
        # The format comes first: another one may well have other keys.
        if isinstance(data, dict) and isinstance(data.get("format"), int):
            _require_format(path, data["format"])
        return RunInfo.model_validate(data)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} is no folder of a run: {_instead(path)}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise _damaged(file, f"{where}: {first['msg']}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from error


def _require_format(path: Path, found: int) -> None:
    if found != writer.FORMAT:
        raise ConfigError(
            f"{path} has format {found}, and this rpcmp reads format {writer.FORMAT}: a newer one "
            "wrote it; update rpcmp here, or run `rpcmp report` where the run was"
        )


def _instead(path: Path) -> str:
    """What somebody may have meant who named a folder that is no run's."""
    if not path.exists():
        return "there is nothing of that name"
    inside = sorted(path.glob(f"*/{writer.RUN}"), key=lambda found: found.stat().st_mtime)
    if not inside:
        return f"it has no {writer.RUN}; `rpcmp drive` makes one a run in `log.folder`"
    names = ", ".join(str(found.parent) for found in reversed(inside[-NAMED:]))
    more = f" and {len(inside) - NAMED} more" if len(inside) > NAMED else ""
    return f"it holds {len(inside)} of them; name one: {names}{more}"


def _events(file: Path) -> list[Event]:
    try:
        objects = json_lines.read(file)
    except (OSError, ValueError) as error:
        raise _damaged(file, error) from error
    events = []
    for number, data in enumerate(objects, start=1):
        if not isinstance(data.get("event"), str) or not _is_time(data.get("time")):
            raise _damaged(file, f"line {number} is no event with a time")
        try:
            event = parse(data, complete=False)  # an older version may not have written all keys
        except ValueError as error:
            raise _damaged(file, f"line {number}: {error}") from error
        if event is not None:
            events.append(event)
    return events


def _is_time(value: Any) -> bool:
    """Whether it is a number that a clock may show; an integer may have any number of digits."""
    return isinstance(value, int | float) and -MAX_TIME < value < MAX_TIME


def _damaged(file: Path, why: object) -> ConfigError:
    reason = (why.strerror or why) if isinstance(why, OSError) else why
    return ConfigError(
        f"{file} is damaged or missing: {reason}; restore the folder from a copy, or report on "
        "another run"
    )
