"""Keeping a run in a folder of its own while it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from rpcmp import jsonlines
from rpcmp.checkpoint.redaction import redacted
from rpcmp.config import Config
from rpcmp.process.channel import Message
from rpcmp.runfolder import layout
from rpcmp.runfolder.layout import RunInfo
from rpcmp.runfolder.thinning import Thinning

Text = Callable[[Callable[[str], None]], Callable[[Message], None]]
"""Given where a line goes, what turns events into lines."""

BEGINNINGS = ("start", "fault")
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
        self.path = layout.make_folder(
            parent, layout.folder_name(self._config.name, self._info.started)
        )
        try:
            self._fill(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
            raise
        self._vanishing.insert(0, self.path)

    def tell(self, event: Message) -> None:
        """See Observer."""
        if self.path is None:  # it could not be made before: now that is a reason to be dropped
            self.make()
        self._has_begun |= event["event"] in BEGINNINGS
        stamped = {"time": time.time(), **event}
        match event["event"]:
            case "step" | "eval":
                self._metrics.append(stamped)
            case "vitals" | "timeline":
                if self._thinning.passes(stamped):
                    self._events.append(stamped)
            case "end":
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
        self._metrics = jsonlines.Writer(path / layout.METRICS, jsonlines.private)
        self._open.callback(self._metrics.close)
        self._events = jsonlines.Writer(path / layout.EVENTS, jsonlines.private)
        self._open.callback(self._events.close)
        log = self._open.enter_context(_opened(path / layout.LOG, "a"))
        self._log = self._text(lambda line: print(line, file=log, flush=True))

    def _make_parent(self, parent: Path) -> None:
        """Folders of runs do not belong into anybody's repository."""
        if parent.is_dir():
            return
        parent.mkdir(mode=0o700, parents=True)
        self._vanishing.append(parent)
        (parent / ".gitignore").write_text("*\n", encoding="utf-8")

    def _note(self, event: Message) -> None:
        """Keep `run.json` true."""
        info = self._info
        match event["event"]:
            case "run":
                self._write_config(event["config"])
                info.versions, info.run = event["versions"], event["job_id"]
            case "resumed" if event["step"]:
                info.run = event["run"]
                info.continues = self._newest_of(info.run)
            case "end":
                info.outcome, info.error = event["outcome"], event["error"]
                info.ended = event["time"]
            case _:
                return
        self._write_info()

    def _newest_of(self, run: str) -> str | None:
        """The name of the newest other folder of that run, where it is still there."""
        assert self.path is not None
        found = []
        for path in self.path.parent.glob(f"*/{layout.RUN}"):
            with contextlib.suppress(OSError, ValueError):
                info = RunInfo.model_validate_json(path.read_bytes())
                if info.run == run and path.parent != self.path:
                    found.append((info.started, path.parent.name))
        return max(found)[1] if found else None

    def _write_config(self, config: Any) -> None:
        self._write(layout.CONFIG, json.dumps(redacted(config), indent=2))

    def _write_info(self) -> None:
        self._write(layout.RUN, self._info.model_dump_json(indent=2))

    def _write(self, name: str, text: str) -> None:
        """Whole or not at all: a kill leaves the file as it was."""
        assert self.path is not None
        new = self.path / f"{name}.new"
        with _opened(new, "w") as file:
            file.write(f"{text}\n")
        new.replace(self.path / name)


def _opened(path: Path, mode: str) -> IO[str]:
    """A file of text that only its owner may read."""
    return open(path, mode, encoding="utf-8", opener=jsonlines.private)


def _remove(folder: Path) -> None:
    """A folder that was made for nothing; one of runs only where it has no others."""
    with contextlib.suppress(OSError):
        if (folder / layout.RUN).exists():
            shutil.rmtree(folder)
        elif [path.name for path in folder.iterdir()] == [".gitignore"]:
            (folder / ".gitignore").unlink()
            folder.rmdir()
