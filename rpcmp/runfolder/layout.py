"""The files of a run folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, Field

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
