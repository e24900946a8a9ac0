"""Which files a run reads and writes, and where. Pure but for a look at what is there."""

from __future__ import annotations

from dataclasses import dataclass

from rpcmp.checkpoint.runs import require_none_asked_for
from rpcmp.config import Config
from rpcmp.errors import ConfigError
from rpcmp.job import code


@dataclass(frozen=True)
class File:
    """A file or a folder.

    Attributes:
        what: which.
        path: absolute, on whichever host.
        text: who does what with it, and when.
        is_in_the_way: whether a run would refuse to begin because of it.
    """

    what: str
    path: str
    text: str
    is_in_the_way: bool = False


def files(config: Config) -> list[File]:
    """All of a job's.

    Raises:
        ConfigError: there is more beside the config than belongs to a model.
    """
    found = [_code(config)] if config.ship_code else []
    if config.init is not None:
        found.append(File("weights", config.init, "read by each stage, on its host"))
    if (folder := config.log_folder) is not None:
        text = "a folder for this run: config, versions, metrics, events, log, last steps' trace"
        found.append(File("run folder", str(folder), text))
    if (folder := config.tensorboard_folder) is not None:
        found.append(
            File("TensorBoard", str(folder), "scalars of this run, in a folder of its own")
        )
    return [*found, _checkpoints(config)]


def _code(config: Config) -> File:
    sent = code.collect(config.folder)
    size = sum(len(file.content) for file in sent)
    count = f"{len(sent)} Python file{'s' * (len(sent) != 1)}"
    return File("code", str(config.folder), f"{count} ({size:,} bytes), sent to each stage server")


def _checkpoints(config: Config) -> File:
    folder, section = config.checkpoint_folder, config.checkpoint
    if section is None:
        keeps = config.takes_snapshots
        text = "only if the run has to give up" if keeps else "none: recovery is off"
        return _looked_at(config, File("checkpoints", str(folder), text))
    when = [
        *([f"every {section.every_steps} steps"] if section.every_steps else []),
        *([f"every {section.every_seconds:g} s"] if section.every_seconds else []),
    ] or ["every 300 s"]
    where = (
        "one folder for all hosts"
        if section.shared
        else ("each stage's file on its host, and a copy on its neighbour's; the manifest here")
    )
    best = f", and the best by {section.best}" if section.best else ""
    text = f"{' or '.join(when)} and at the end, {section.keep} kept{best}; {where}"
    return _looked_at(config, File("checkpoints", str(folder), text))


def _looked_at(config: Config, file: File) -> File:
    """With what a run would say to what is there already."""
    if config.checkpoint is not None:
        try:
            require_none_asked_for(config.checkpoint_folder)
        except ConfigError as error:
            return File(file.what, file.path, str(error), is_in_the_way=True)
    return file
