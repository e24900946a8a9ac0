"""The folder that is kept of each run, and the observer that writes it.

NAME-20261122-101500/
  run.json         name, versions, times, the run that it continues, the outcome
  config.json      the config, without secrets
  metrics.jsonl    a line per step and a line per evaluation
  events.jsonl     all other events; periodic ones are thinned out
  log.txt          the output that a terminal would have shown
  trace.json.gz    the last steps, for Perfetto and `rpcmp trace`
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import IO, Any, Final, Literal

from pydantic import BaseModel, Field

from rpcmp.config.files import MIB, read_bytes
from rpcmp.config.schema import Config
from rpcmp.config.stored import redacted
from rpcmp.observability import events
from rpcmp.observability.events.event import dumps

THINNED_SECONDS = 30.0
"""Seconds between two periodic events of a kind, at first."""

THINNED_SHARE = 0.05
"""Later the interval is this share of the time since the run's start."""


class Thinning:
    """Passes fewer and fewer events of each kind, and keeps the newest that it held back."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._passed: dict[str, float] = {}
        self._held: dict[str, events.Json] = {}

    def passes(self, event: events.Json) -> bool:
        """Return whether to write an event, which has a `time`."""
        kind, now = event["event"], event["time"]
        if self._first is None:
            self._first = now
        since = now - self._passed.get(kind, float("-inf"))
        if 0 <= since < max(THINNED_SECONDS, THINNED_SHARE * (now - self._first)):
            self._held[kind] = event
            return False
        self._passed[kind] = now
        self._held.pop(kind, None)
        return True

    def take_held(self) -> list[events.Json]:
        """Return the newest event of each kind that was held back after the last one passed."""
        held, self._held = list(self._held.values()), {}
        return held


def append_line(file: FileIO, value: events.Json) -> None:
    """Append a line of JSON with one call, so that a kill can only cut off the last line."""
    line = f"{dumps(value)}\n".encode()
    written = file.write(line)
    if written < len(line):  # the disk is full: writing the rest raises the error
        file.write(line[written:])


FORMAT: Final = 1
"""The present format of the folder, the first one."""

RUN = "run.json"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
LOG = "log.txt"
TRACE = "trace.json.gz"


MAX_INFO = MIB
"""Of a run's description, in a folder that others may write to."""


class RunInfo(BaseModel):
    """The contents of `run.json`.

    Attributes:
        format: format of the folder.
        name: name of the job.
        started: start of the run in seconds since 1970, like `ended`.
        run: `job_id` of the run; a run that resumes another keeps its id.
        continues: the folder of the run that this one resumes.
        versions: of rpcmp, torch and Python.
        driver: host of the driver.
        pid: process id of `rpcmp drive` on that host.
        outcome: "running" until the run ends; a run that was killed keeps it.
        error: the error, if the run failed.
        ended: end of the run; None until then.
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


def make_folder(parent: Path, name: str, started: float) -> Path:
    """Make the folder of a run, whose name contains its start in local time.

    If the name is taken, it gets a number.
    """
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}"
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            path = parent / f"{name}-{number}"
        else:
            return path


Text = Callable[[Callable[[str], None]], Callable[[events.Event], None]]
"""Given a function that writes a line, returns the function that writes an event's lines."""

FIRST_EVENTS = (events.StartEvent, events.FaultEvent)
"""The folder is only kept if one of these events occurs."""


class RunFolder:
    """An observer that keeps one run; each line reaches the kernel at once, so a kill loses none.

    Args:
        config: the job, with the path of the parent folder.
        text: creates the writer of the log.

    Attributes:
        path: the folder; None before `make`.
    """

    name = "the run folder"

    def __init__(self, config: Config, text: Text) -> None:
        self.path: Path | None = None
        self._config = config
        self._text = text
        self._info = RunInfo(
            name=config.name, started=time.time(), driver=platform.node(), pid=os.getpid()
        )
        self._has_started = False
        self._removable: list[Path] = []
        self._thinning = Thinning()
        self._open = contextlib.ExitStack()

    def make(self) -> None:
        """Make the folder and its first files; raises OSError if it cannot be written."""
        parent = self._config.log_folder
        assert parent is not None
        self._make_parent(parent)
        self.path = make_folder(parent, self._config.name, self._info.started)
        try:
            self._fill(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
            raise
        self._removable.insert(0, self.path)

    def handle(self, event: events.Event) -> None:
        if self.path is None:  # `make` failed before; a second failure drops the observer
            self.make()
        self._has_started |= isinstance(event, FIRST_EVENTS)
        data = {"time": time.time(), **event.to_json()}
        if isinstance(event, events.EndEvent):
            for held in self._thinning.take_held():
                append_line(self._events, held)
        if not isinstance(
            event, events.VitalsEvent | events.TimelineEvent
        ) or self._thinning.passes(data):
            is_metric = isinstance(event, events.StepEvent | events.EvalEvent)
            append_line(self._metrics if is_metric else self._events, data)
        self._log(event)
        self._update_info(event)

    def close(self) -> None:
        """Close all files; a run that never started leaves no folder behind."""
        self._open.close()
        if not self._has_started:
            for folder in self._removable:
                _remove(folder)

    def _fill(self, path: Path) -> None:
        self._write_config(self._config.model_dump(mode="json"))
        self._write_info()
        self._metrics, self._events = (
            self._open.enter_context(FileIO(path / name, "a", opener=_open_private))
            for name in (METRICS, EVENTS)
        )
        log = self._open.enter_context(_open_text(path / LOG, "a"))
        self._log = self._text(lambda line: print(line, file=log, flush=True))

    def _make_parent(self, parent: Path) -> None:
        """Make the parent of all folders, with a .gitignore to keep them out of repositories."""
        if parent.is_dir():
            return
        parent.mkdir(mode=0o700, parents=True)
        self._removable.append(parent)
        (parent / ".gitignore").write_text("*\n", encoding="utf-8")

    def _update_info(self, event: events.Event) -> None:
        info = self._info
        match event:
            case events.RunEvent():
                self._write_config(event.config)
                info.versions, info.run = event.versions, event.job_id
            case events.ResumedEvent() if event.run is not None:
                info.run = event.run
                info.continues = self._newest_of(info.run)
            case events.EndEvent():
                info.outcome, info.error = event.outcome, event.error
                info.ended = event.time
            case _:
                return
        self._write_info()

    def _newest_of(self, run: str) -> str | None:
        """Return the name of the newest other folder of that run, or None."""
        assert self.path is not None
        folders = []
        for path in self.path.parent.glob(f"*/{RUN}"):
            with contextlib.suppress(OSError, ValueError):
                info = RunInfo.model_validate_json(read_bytes(path, MAX_INFO))
                if info.run == run and path.parent != self.path:
                    folders.append((info.started, path.parent.name))
        return max(folders)[1] if folders else None

    def _write_config(self, config: Any) -> None:
        self._write(CONFIG, json.dumps(redacted(config), indent=2))

    def _write_info(self) -> None:
        self._write(RUN, self._info.model_dump_json(indent=2))

    def _write(self, name: str, text: str) -> None:
        """Replace a file atomically, so that a kill leaves either the old or the new one."""
        assert self.path is not None
        new = self.path / f"{name}.new"
        with _open_text(new, "w") as file:
            file.write(f"{text}\n")
        new.replace(self.path / name)


def _open_private(path: str, flags: int) -> int:
    """Open a file; a new file is readable by its owner alone. See `opener` of `open`."""
    return os.open(path, flags, 0o600)


def _open_text(path: Path, mode: str) -> IO[str]:
    return open(path, mode, encoding="utf-8", opener=_open_private)


def _remove(folder: Path) -> None:
    """Remove a run's folder, or the folder of runs if it is empty."""
    with contextlib.suppress(OSError):
        if (folder / RUN).exists():
            shutil.rmtree(folder)
        elif [path.name for path in folder.iterdir()] == [".gitignore"]:
            (folder / ".gitignore").unlink()
            folder.rmdir()
