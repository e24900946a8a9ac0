"""The folder of one run's checkpoints: which there are, and which may go.

    step-00000120/manifest.json       on the driver's host, written last
    step-00000120/<stage>.safetensors on the stage's host

A step folder without a manifest is no checkpoint: its stages are still writing, or never finished.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rpcmp.checkpoint.files import FOLDER, Where, folder_of, sync, write_durably
from rpcmp.checkpoint.manifest import Manifest, dumps, loads
from rpcmp.config.bounded_file import MIB, read_bytes
from rpcmp.errors import CheckpointConflictError, CheckpointError

MANIFEST = "manifest.json"

MAX_MANIFEST = 16 * MIB
"""Bytes of a manifest: 200,000 layers."""

RUN_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
"""What the folder of a run is called in one of several; see rpcmp.checkpoint.folder."""

_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A step folder with a manifest: what it says, or what is wrong with it."""

    path: Path
    manifest: Manifest | None
    problem: str = ""


class CheckpointFolder:
    """The checkpoints in the folder `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint after `step` steps."""
        return self.path / name_of(step)

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of the stages' files: from now on, it exists.

        Raises:
            CheckpointError: the manifest cannot be written.
        """
        path = self.path_of(manifest.step) / MANIFEST
        try:
            write_durably(path, [dumps(manifest).encode()])
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error

    def found(self) -> list[FoundCheckpoint]:
        """All checkpoints, damaged ones too, that of the highest step first.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return [found for path in self._step_folders() if (found := look(path))]

    def valid(self) -> list[Manifest]:
        """The manifests that are whole, that of the highest step first. Files are not checked.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return [found.manifest for found in self.found() if found.manifest]

    def best(self) -> Manifest | None:
        """The best checkpoint: the newest that is marked so; None: none is.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        return next((manifest for manifest in self.valid() if manifest.best is not None), None)

    def surplus(self, keep: int) -> list[Path]:
        """Step folders that are not needed besides the newest `keep` valid ones and the best.

        The newest valid one always stays, and what is newer: its stages may be writing it.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        valid = self.valid()
        if not valid:
            return []
        best = [manifest for manifest in valid if manifest.best is not None][:1]
        kept = {manifest.step for manifest in (*valid[:keep], *best)}
        older = [path for path in self._step_folders() if _step(path) < valid[0].step]
        return [path for path in older if _step(path) not in kept]

    def _step_folders(self) -> list[Path]:
        """Step folders, with or without a manifest, that of the highest step first."""
        try:
            paths = [path for path in self.path.iterdir() if step_of(path) is not None]
            return sorted((path for path in paths if path.is_dir()), key=_step, reverse=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error


def look(step_folder: Path) -> FoundCheckpoint | None:
    """The checkpoint in a step folder; None where it has no manifest, so that there is none.

    The folder may have any name, as a copy has.
    """
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
    """The name of the folder of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder is named after; None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _step(path: Path) -> int:
    return step_of(path) or 0


def remove(folder: Where) -> None:
    """Remove a step folder, or that of a run with all its step folders.

    Raises:
        CheckpointError: it is neither, or cannot be removed.
    """
    if RUN_NAME.fullmatch(folder.name) is None:
        _remove_step(folder)
        return
    try:
        with folder_of(folder / name_of(0)) as inside:
            steps = [name for name in os.listdir(inside) if _NAME.fullmatch(name)]
        for step in steps:
            _remove_step(folder / step)
        with folder_of(folder) as above:
            os.rmdir(folder.name, dir_fd=above)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot remove {folder}: {error.strerror}") from error


def _remove_step(step_folder: Where) -> None:
    """Remove a step folder, or what is left of it; subfolders are not ours and an error.

    The manifest goes first, durably: a checkpoint that was half removed does not exist.

    Raises:
        CheckpointError: it is no step folder, or cannot be removed.
    """
    if _NAME.fullmatch(step_folder.name) is None:
        raise CheckpointError(f"{step_folder} is no step folder")
    try:
        with folder_of(step_folder) as above:
            _empty(step_folder.name, above)
            os.rmdir(step_folder.name, dir_fd=above)
    except FileNotFoundError:
        return  # by another host, where they share the folder
    except OSError as error:
        raise CheckpointError(f"cannot remove {step_folder}: {error.strerror}") from error


def _empty(name: str, above: int) -> None:
    folder = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=above)
    try:
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
        name: of its folder; empty: the folder that was looked into is that of the run.
        folder: where they are.
        found: all of them, damaged ones too, that of the highest step first; at least one.
    """

    name: str
    folder: CheckpointFolder
    found: list[FoundCheckpoint]

    @property
    def newest(self) -> Manifest | None:
        """The one of the highest step that is whole; None: all are damaged."""
        return next((found.manifest for found in self.found if found.manifest), None)

    @property
    def last_step(self) -> int:
        """The highest step that is whole; 0: all are damaged."""
        return self.newest.step if self.newest else 0

    @property
    def to_remove(self) -> list[Path]:
        """The folders without which nothing is left of the run."""
        return [self.folder.path] if self.name else [found.path for found in self.found]

    @property
    def was_asked_for(self) -> bool:
        """Whether the config of the run wanted one of them; a damaged one does not say."""
        return any(found.manifest.is_asked_for for found in self.found if found.manifest)

    @property
    def written(self) -> datetime:
        """When the newest was, by its manifest, or else by its folder; long ago if neither says."""
        try:
            if self.newest is None:
                return datetime.fromtimestamp(self.found[0].path.stat().st_mtime, UTC)
            written = datetime.fromisoformat(self.newest.written)
        except (OSError, ValueError):
            return datetime.min.replace(tzinfo=UTC)
        return written if written.tzinfo else written.replace(tzinfo=UTC)

    def is_before(self, since: datetime) -> bool:
        """Whether the run has written nothing since then, to the second."""
        return self.written < since.replace(microsecond=0)

    def __str__(self) -> str:
        if self.newest is None:
            return f"{self.folder.path} ({self.found[0].problem})"
        return f"{self.folder.path} (step {self.newest.step}, written {self.newest.written})"


def new_name(run: str) -> str:
    """The name of the folder of a run that begins now.

    Args:
        run: unique for each, hexadecimal.
    """
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{run[:6]}"


def runs_in(folder: Path) -> list[RunCheckpoints]:
    """The runs that have checkpoints in a folder, the one that wrote last first.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        names = [path.name for path in folder.iterdir() if RUN_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    every = [("", CheckpointFolder(folder))]
    every += [(name, CheckpointFolder(folder / name)) for name in sorted(names, reverse=True)]
    looked = [RunCheckpoints(name, one, one.found()) for name, one in every]
    return sorted((run for run in looked if run.found), key=lambda run: run.written, reverse=True)


def whole_runs(folder: Path, job: str) -> list[RunCheckpoints]:
    """The runs of a job that have a checkpoint which is whole, the one that wrote last first.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return [run for run in runs_in(folder) if run.newest and run.newest.job == job]


def newest_in(folder: Path, job: str = "") -> RunCheckpoints | None:
    """The run that wrote last; of this job, where there is one of it. None: there is no run.

    One that is damaged does not say whose it is, and is not passed over.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    found = runs_in(folder)
    ours = [run for run in found if run.newest is None or run.newest.job == job]
    return next(iter(ours or found), None)


def require_none_asked_for(folder: Path) -> None:
    """Fail where a new run would begin beside checkpoints that a config asked for.

    That is seldom meant, so whoever begins it has to say it.

    Raises:
        CheckpointConflictError: there are some.
        CheckpointError: the folder cannot be read.
    """
    for run in runs_in(folder):
        if run.was_asked_for and run.newest is not None:
            raise CheckpointConflictError(
                f"{folder} holds checkpoints of another run: job {run.newest.job!r}, step "
                f"{run.newest.step}, written {run.newest.written}; go on with --resume, or begin "
                "anew beside them with --fresh"
            )


def left_behind(folder: Path, job: str, asks: bool) -> list[RunCheckpoints]:
    """The runs of a job that left something which no config had asked for, the newest first.

    Args:
        folder: of the job's checkpoints.
        job: its name.
        asks: whether its config asks for checkpoints; where it does not, there is nothing else in
            the folder, whatever a manifest of rpcmp 0.1 says.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return [run for run in whole_runs(folder, job) if not (asks and run.was_asked_for)]
