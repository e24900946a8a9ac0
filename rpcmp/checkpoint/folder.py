"""The folders of runs and their checkpoints: find them, mark them complete, remove them.

    <dir>/20261122-101500-3f9a2c/step-00000120/...   each run has a folder, named after its start
    <dir>/step-00000120/...                          or `dir` is the folder of one run
          step-00000120/manifest.json                on the driver's host, written last
          step-00000120/<stage>.safetensors          on the stage's host

A step folder without a manifest is not a checkpoint: its stages are still writing, or never
finished. Runs do not write into or prune each other's folders. The manifest notes whether a config
with a [checkpoint] asked for the checkpoint, be it on schedule or because of a signal, or whether
the run made it because it had to give up: only the former makes the next run ask whether to resume,
and only the latter is ever removed by another run.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rpcmp.checkpoint.files import FOLDER, Where, folder_of, sync, write_durably
from rpcmp.config.files import MIB, read_bytes
from rpcmp.errors import CheckpointConflictError, CheckpointError

if TYPE_CHECKING:
    from rpcmp.checkpoint.manifest import Manifest  # pydantic: servers read no manifests

MANIFEST = "manifest.json"

MAX_MANIFEST = 16 * MIB
"""Bytes of a manifest: 200,000 layers."""

RUN_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
"""Names of the folders of runs; see `new_name`."""

_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")

_PART = re.compile(r"[A-Za-z0-9_-]+\.safetensors")


def require_name(parts: Sequence[str]) -> None:
    """Check that messages name what a run makes below its folder of checkpoints, and nothing else.

    A folder of steps, of a run or of all, or a stage's file in one.

    Raises:
        CheckpointError: they name something else, such as `.ssh/authorized_keys`.
    """
    below = [*parts]
    if below and RUN_NAME.fullmatch(below[0]):
        del below[0]
    kinds = (_NAME, _PART)
    is_made = len(below) <= len(kinds) and all(
        kind.fullmatch(name) for kind, name in zip(kinds, below, strict=False)
    )
    if not parts or not is_made:
        raise CheckpointError(f"{'/'.join(parts)!r} is no checkpoint, and no stage's file in one")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A step folder with a manifest, or with a problem that keeps it from being read."""

    path: Path
    manifest: Manifest | None
    problem: str = ""


class CheckpointFolder:
    """The checkpoints in the folder `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def path_of(self, step: int) -> Path:
        return self.path / name_of(step)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which makes a checkpoint of the stages' files."""
        from rpcmp.checkpoint.manifest import dumps

        path = self.path_of(manifest.step) / MANIFEST
        try:
            write_durably(path, [dumps(manifest).encode()])
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error

    def found(self) -> list[FoundCheckpoint]:
        """Return all checkpoints, damaged ones too, the highest step first."""
        return [found for path in self._step_folders() if (found := look(path))]

    def valid(self) -> list[Manifest]:
        """Return the undamaged manifests, the highest step first; does not check files."""
        return [found.manifest for found in self.found() if found.manifest]

    def best(self) -> Manifest | None:
        return next((manifest for manifest in self.valid() if manifest.best is not None), None)

    def surplus(self, keep: int) -> list[Path]:
        """Return the step folders besides the newest `keep` valid ones and the best.

        Folders newer than the newest valid one stay, too: their stages may be writing them.
        """
        valid = self.valid()
        if not valid:
            return []
        best = [manifest for manifest in valid if manifest.best is not None][:1]
        kept = {manifest.step for manifest in (*valid[:keep], *best)}
        older = [path for path in self._step_folders() if _step(path) < valid[0].step]
        return [path for path in older if _step(path) not in kept]

    def _step_folders(self) -> list[Path]:
        try:
            paths = [path for path in self.path.iterdir() if step_of(path) is not None]
            return sorted((path for path in paths if path.is_dir()), key=_step, reverse=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error


def look(step_folder: Path) -> FoundCheckpoint | None:
    """Return the checkpoint in a step folder of any name; None if it has no manifest."""
    from rpcmp.checkpoint.manifest import loads

    path = step_folder / MANIFEST
    try:
        manifest = loads(read_bytes(path, MAX_MANIFEST), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return FoundCheckpoint(step_folder, None, f"cannot read {path}: {error.strerror}")
    except CheckpointError as error:
        return FoundCheckpoint(step_folder, None, str(error))
    except ValueError as error:
        return FoundCheckpoint(step_folder, None, f"{path} is no manifest: {error}")
    if step_of(step_folder) not in (None, manifest.step):
        return FoundCheckpoint(step_folder, None, f"{path} is the manifest of step {manifest.step}")
    return FoundCheckpoint(step_folder, manifest)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step that a folder is named after; None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _step(path: Path) -> int:
    return step_of(path) or 0


def remove(folder: Where) -> None:
    """Remove a step folder, or a run's folder with all its step folders.

    Subfolders of a step folder are an error: rpcmp makes none.

    Raises:
        CheckpointError: it is neither, or cannot be removed.
    """
    is_run = RUN_NAME.fullmatch(folder.name) is not None
    if not is_run and _NAME.fullmatch(folder.name) is None:
        raise CheckpointError(f"{folder} is no step folder")
    try:
        if is_run:
            with folder_of(folder / name_of(0)) as inside:
                steps = [name for name in os.listdir(inside) if _NAME.fullmatch(name)]
            for step in steps:
                remove(folder / step)
        with folder_of(folder) as above:
            if not is_run:
                _empty(folder.name, above)
            os.rmdir(folder.name, dir_fd=above)
    except FileNotFoundError:
        return  # another host has removed it, if they share the folder
    except OSError as error:
        raise CheckpointError(f"cannot remove {folder}: {error.strerror}") from error


def _empty(name: str, above: int) -> None:
    folder = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=above)
    try:
        # The manifest goes first, durably: a checkpoint that was half removed does not exist.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(MANIFEST, dir_fd=folder)
        sync(folder)
        for file in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file, dir_fd=folder)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class RunCheckpoints:
    """The checkpoints of one run.

    Attributes:
        name: its folder's; empty if the folder that was searched is the run's own.
        folder: the run's.
        found: at least one, damaged ones too, the highest step first.
    """

    name: str
    folder: CheckpointFolder
    found: list[FoundCheckpoint]

    @property
    def newest(self) -> Manifest | None:
        return next((found.manifest for found in self.found if found.manifest), None)

    @property
    def last_step(self) -> int:
        return self.newest.step if self.newest else 0

    @property
    def to_remove(self) -> list[Path]:
        return [self.folder.path] if self.name else [found.path for found in self.found]

    @property
    def was_asked_for(self) -> bool:
        return any(found.manifest.is_asked_for for found in self.found if found.manifest)

    @property
    def written(self) -> datetime:
        """Time of the newest, by its manifest or its folder; the earliest date if unknown."""
        try:
            if self.newest is None:
                return datetime.fromtimestamp(self.found[0].path.stat().st_mtime, UTC)
            written = datetime.fromisoformat(self.newest.written)
        except (OSError, ValueError):
            return datetime.min.replace(tzinfo=UTC)
        return written if written.tzinfo else written.replace(tzinfo=UTC)

    def is_before(self, since: datetime) -> bool:
        """Whether the run has written nothing since then, in whole seconds."""
        return self.written < since.replace(microsecond=0)

    def __str__(self) -> str:
        if self.newest is None:
            return f"{self.folder.path} ({self.found[0].problem})"
        return f"{self.folder.path} (step {self.newest.step}, written {self.newest.written})"


def new_name(run: str) -> str:
    """Return the name of the folder of a run that starts now; `run` is unique and hexadecimal."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{run[:6]}"


def runs_in(folder: Path) -> list[RunCheckpoints]:
    """Return the runs that have checkpoints in a folder, the one that wrote last first."""
    try:
        names = [path.name for path in folder.iterdir() if RUN_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    runs = []
    for name in ("", *sorted(names, reverse=True)):
        run_folder = CheckpointFolder(folder / name)
        if checkpoints := run_folder.found():
            runs.append(RunCheckpoints(name, run_folder, checkpoints))
    return sorted(runs, key=lambda run: run.written, reverse=True)


def whole_runs(folder: Path, job: str) -> list[RunCheckpoints]:
    """Return a job's runs with an undamaged checkpoint, the one that wrote last first."""
    return [run for run in runs_in(folder) if run.newest and run.newest.job == job]


def newest_in(folder: Path, job: str = "") -> RunCheckpoints | None:
    """Return the run that wrote last, preferring the job's; None if there is no run.

    A damaged run may be any job's, so it is not passed over.
    """
    runs = runs_in(folder)
    own = [run for run in runs if run.newest is None or run.newest.job == job]
    return next(iter(own or runs), None)


def require_none_asked_for(folder: Path) -> None:
    """Raise CheckpointConflictError if a folder has checkpoints that a config asked for.

    A new run beside them is seldom meant, so it needs --fresh.
    """
    for run in runs_in(folder):
        if run.was_asked_for and run.newest is not None:
            raise CheckpointConflictError(
                f"{folder} holds checkpoints of another run: job {run.newest.job!r}, step "
                f"{run.newest.step}, written {run.newest.written}; go on with --resume, or begin "
                "anew beside them with --fresh"
            )


def left_behind(folder: Path, job: str, asks: bool) -> list[RunCheckpoints]:
    """Return a job's runs with checkpoints that no config asked for, the newest first.

    If the job's config does not ask for checkpoints, the folder has no others, whatever a manifest
    of rpcmp 0.1 says.
    """
    return [run for run in whole_runs(folder, job) if not (asks and run.was_asked_for)]
