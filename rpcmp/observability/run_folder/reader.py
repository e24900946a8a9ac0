"""Reading the folder of a run, even if the run was killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rpcmp.config.files import MIB, read_bytes
from rpcmp.errors import ConfigError
from rpcmp.observability import json_lines
from rpcmp.observability.events import Event, parse
from rpcmp.observability.run_folder import writer
from rpcmp.observability.run_folder.writer import RunInfo

MAX_JSON = 16 * MIB
"""Largest `run.json` and `config.json`, in bytes."""

MAX_TIME = 2.0**53
"""Upper limit of times in seconds, beyond any date."""

NAMED = 3
"""Folders that an error message lists."""


Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Record:
    """The contents of a run's folder.

    Attributes:
        path: the folder.
        info: the contents of `run.json`.
        config: the job's config; see rpcmp.config.files.
        events: the events in order, without those that this version does not define; each has a
            time.
    """

    path: Path
    info: RunInfo
    config: dict[str, Any]
    events: Sequence[Event]

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.absolute().name

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]


def read(path: Path) -> Record:
    """Read the folder of a run.

    Raises:
        ConfigError: it is not the folder of a run, is damaged, or was written by a newer rpcmp.
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
        # The format is checked first, since another one may have other keys.
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
    """Suggest other folders for one that is not the folder of a run."""
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
    """Return whether `value` is a plausible time; an integer may have any number of digits."""
    return isinstance(value, int | float) and -MAX_TIME < value < MAX_TIME


def _damaged(file: Path, why: object) -> ConfigError:
    reason = (why.strerror or why) if isinstance(why, OSError) else why
    return ConfigError(
        f"{file} is damaged or missing: {reason}; restore the folder from a copy, or report on "
        "another run"
    )
