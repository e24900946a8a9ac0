"""Keeping a run in a folder of its own while it goes on.

Fewer of the events that come as long as a run lasts, so that a long run fills no disk.

The files of a run folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, Literal

from pydantic import BaseModel, Field

from rpcmp.config.hashes import redacted
from rpcmp.config.schema import Config
from rpcmp.observability import json_lines
from rpcmp.observability.events.definitions import (
    EndEvent,
    EvalEvent,
    FaultEvent,
    ResumedEvent,
    RunEvent,
    StartEvent,
    StepEvent,
    TimelineEvent,
    VitalsEvent,
)
from rpcmp.observability.events.event import Event, Json

SECONDS = 30.0
"""Between two of a kind, at first."""

SHARE = 0.05
"""Of the time that has passed: later, two of a kind are as far apart as this."""


class Thinning:
    """Lets pass fewer and fewer events of each kind, and keeps the newest that it held back."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._passed: dict[str, float] = {}
        self._held: dict[str, Json] = {}

    def passes(self, event: Json) -> bool:
        """Whether to write an event; it has a `time`."""
        kind, now = event["event"], event["time"]
        if self._first is None:
            self._first = now
        since = now - self._passed.get(kind, float("-inf"))
        if 0 <= since < max(SECONDS, SHARE * (now - self._first)):
            self._held[kind] = event
            return False
        self._passed[kind] = now
        self._held.pop(kind, None)
        return True

    def take_held(self) -> list[Json]:
        """The newest of each kind, where it was held back."""
        held, self._held = list(self._held.values()), {}
        return held


FORMAT: Final = 1
"""The only format that there has been."""

RUN = "run.json"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
LOG = "log.txt"
TRACE = "trace.json.gz"


class RunInfo(BaseModel):
    """What `run.json` says.

    Attributes:
        format: of the folder.
        name: the job's.
        started: when, in seconds since 1970; so is `ended`.
        run: which run of the job it is; one that is resumed keeps it.
        continues: the folder of the run that this one goes on with.
        versions: of rpcmp, torch and Python.
        driver: host of the driver.
        pid: of `rpcmp drive` there.
        outcome: how it ended; "running" until then, and for good where it was killed.
        error: why, where it failed.
        ended: None until then.
    """

    format: int = FORMAT
    name: str
    started: float
    run: str = ""
    continues: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    driver: str = ""
    pid: int = 0
    outcome: Literal["running", "done", "failed", "interrupted"] = "running"
    error: str = ""
    ended: float | None = None


def folder_name(name: str, started: float) -> str:
    """What the folder of a run is called that started then, by the clock on the wall."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}"


def make_folder(parent: Path, name: str) -> Path:
    """A new folder in `parent`, with a number behind its name where that is taken.

    Raises:
        OSError: it cannot be made.
    """
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            continue
        return path


Text = Callable[[Callable[[str], None]], Callable[[Event], None]]
"""Given where a line goes, what turns events into lines."""

BEGINNINGS = (StartEvent, FaultEvent)
"""Events without which there has been no run, and nothing to keep."""


class RunFolder:
    """Keeps one run; an observer. Every line is with the system at once, so a kill costs none.

    Args:
        config: the job, which says where.
        text: makes the lines of the log.

    Attributes:
        path: of the folder; None as long as there is none.
    """

    name = "the run folder"

    def __init__(self, config: Config, text: Text) -> None:
        self.path: Path | None = None
        self._config = config
        self._text = text
        self._info = RunInfo(
            name=config.name, started=time.time(), driver=platform.node(), pid=os.getpid()
        )
        self._has_begun = False
        self._vanishing: list[Path] = []
        self._thinning = Thinning()
        self._open = contextlib.ExitStack()

    def make(self) -> None:
        """Make the folder, with all that is known by now.

        Raises:
            OSError: it cannot be written.
        """
        parent = self._config.log_folder
        assert parent is not None
        self._make_parent(parent)
        self.path = make_folder(parent, folder_name(self._config.name, self._info.started))
        try:
            self._fill(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
            raise
        self._vanishing.insert(0, self.path)

    def tell(self, event: Event) -> None:
        """See Observer."""
        if self.path is None:  # it could not be made before: now that is a reason to be dropped
            self.make()
        self._has_begun |= isinstance(event, BEGINNINGS)
        stamped = {"time": time.time(), **event.to_json()}
        match event:
            case StepEvent() | EvalEvent():
                self._metrics.append(stamped)
            case VitalsEvent() | TimelineEvent():
                if self._thinning.passes(stamped):
                    self._events.append(stamped)
            case EndEvent():
                for held in self._thinning.take_held():
                    self._events.append(held)
                self._events.append(stamped)
            case _:
                self._events.append(stamped)
        self._log(event)
        self._note(event)

    def close(self) -> None:
        """Close all files; a run that never began leaves no folder behind."""
        self._open.close()
        if not self._has_begun:
            for folder in self._vanishing:
                _remove(folder)

    def _fill(self, path: Path) -> None:
        self._write_config(self._config.model_dump(mode="json"))
        self._write_info()
        self._metrics = json_lines.Writer(path / METRICS, json_lines.private)
        self._open.callback(self._metrics.close)
        self._events = json_lines.Writer(path / EVENTS, json_lines.private)
        self._open.callback(self._events.close)
        log = self._open.enter_context(_opened(path / LOG, "a"))
        self._log = self._text(lambda line: print(line, file=log, flush=True))

    def _make_parent(self, parent: Path) -> None:
        """Folders of runs do not belong into anybody's repository."""
        if parent.is_dir():
            return
        parent.mkdir(mode=0o700, parents=True)
        self._vanishing.append(parent)
        (parent / ".gitignore").write_text("*\n", encoding="utf-8")

    def _note(self, event: Event) -> None:
        """Keep `run.json` true."""
        info = self._info
        match event:
            case RunEvent():
                self._write_config(event.config)
                info.versions, info.run = event.versions, event.job_id
            case ResumedEvent() if event.run is not None:
                info.run = event.run
                info.continues = self._newest_of(info.run)
            case EndEvent():
                info.outcome, info.error = event.outcome, event.error
                info.ended = event.time
            case _:
                return
        self._write_info()

    def _newest_of(self, run: str) -> str | None:
        """The name of the newest other folder of that run, where it is still there."""
        assert self.path is not None
        found = []
        for path in self.path.parent.glob(f"*/{RUN}"):
            with contextlib.suppress(OSError, ValueError):
                info = RunInfo.model_validate_json(path.read_bytes())
                if info.run == run and path.parent != self.path:
                    found.append((info.started, path.parent.name))
        return max(found)[1] if found else None

    def _write_config(self, config: Any) -> None:
        self._write(CONFIG, json.dumps(redacted(config), indent=2))

    def _write_info(self) -> None:
        self._write(RUN, self._info.model_dump_json(indent=2))

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all: a kill leaves the file as it was."""
        assert self.path is not None
        new = self.path / f"{name}.new"
        with _opened(new, "w") as file:
            file.write(f"{text}\n")
        new.replace(self.path / name)


def _opened(path: Path, mode: str) -> IO[str]:
    """A file of text that only its owner may read."""
    return open(path, mode, encoding="utf-8", opener=json_lines.private)


def _remove(folder: Path) -> None:
    """A folder that was made for nothing; one of runs only where it has no others."""
    with contextlib.suppress(OSError):
        if (folder / RUN).exists():
            shutil.rmtree(folder)
        elif [path.name for path in folder.iterdir()] == [".gitignore"]:
            (folder / ".gitignore").unlink()
            folder.rmdir()
