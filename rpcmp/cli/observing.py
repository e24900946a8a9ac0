"""Who looks at a run of `rpcmp drive`, by its config."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rpcmp.cli.output import plain, with_log
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.observability.events.definitions import KeptEvent
from rpcmp.observability.events.event import Event
from rpcmp.observability.observers import Observer, Report, loggers
from rpcmp.observability.run_folder.writer import BEGINNINGS, RunFolder
from rpcmp.observability.tensorboard import TensorBoard

SHOWN_SECONDS = 2.0
"""Between two timelines that somebody looks at."""

KEPT_SECONDS = 10.0
"""Between two that are kept for later."""


def observers(config: Config) -> list[Observer]:
    """Those of `[log]`: all that can be known to fail fails here, before anything starts.

    Raises:
        ConfigError: a folder cannot be written, or a logger cannot be had.
    """
    found: list[Observer] = []
    try:
        if config.log_folder is not None:
            found.append(run_folder(config))
        if config.log.tensorboard is not None:
            found.append(TensorBoard(config))
        found += loggers(config)
    except BaseException:
        for observer in found:
            observer.close()
        raise
    return found


@contextlib.contextmanager
def saying_where(found: Sequence[Observer], report: Report) -> Iterator[Report]:
    """Report the event `kept` at the end of a run that has begun: where its folder is."""
    begun, last = False, 0

    def noting(event: Event) -> None:
        nonlocal begun, last
        begun |= isinstance(event, BEGINNINGS)
        last = last if event.generation is None else event.generation
        report(event)

    try:
        yield noting
    finally:
        path = path_of(found)
        if begun and path is not None:
            report(KeptEvent(path=str(path)).stamped(time.time(), last))


def seconds_between_timelines(found: Sequence[Observer]) -> float:
    """How often a step is looked at; 0: nobody does. A folder alone keeps few of them."""
    if not found:
        return 0.0
    return KEPT_SECONDS if all(isinstance(each, RunFolder) for each in found) else SHOWN_SECONDS


def path_of(found: Sequence[Observer]) -> Path | None:
    """The run's folder, where there is one."""
    paths = (observer.path for observer in found if isinstance(observer, RunFolder))
    return next(paths, None)


def run_folder(config: Config) -> RunFolder:
    """The run's own folder. Where nobody has asked for one, it is no reason not to train.

    Raises:
        ConfigError: the config's folder cannot be written.
    """
    folder = RunFolder(config, lambda write: with_log(plain(write), write))
    try:
        folder.make()
    except OSError as error:
        if "folder" in config.log.model_fields_set:
            folder.close()
            raise ConfigError(
                f"log.folder: cannot write {config.log_folder}: {error.strerror}; give another "
                'folder, or log.folder = "" for none'
            ) from error
    return folder
