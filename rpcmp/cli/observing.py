"""The observers of a run of `rpcmp drive`: run folder, TensorBoard, loggers, page and metrics.

Commands other than `drive` do not import this module: it needs pydantic and the observers'
libraries.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rpcmp.cli import echo
from rpcmp.cli.options import ANY_PORT
from rpcmp.cli.progress_output import plain, with_log
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.observability.events import Event, KeptEvent, UiEvent
from rpcmp.observability.observers import Observer, Report, create_loggers
from rpcmp.observability.run_folder import FIRST_EVENTS, RunFolder

SHOWN_SECONDS = 2.0
"""Between two timelines of a run that is watched live."""

KEPT_SECONDS = 10.0
"""Between two timelines that are only kept in the run folder."""


def create_observers(config: Config) -> list[Observer]:
    """Create the observers of `[log]`; what can fail fails here, before the run starts."""
    observers: list[Observer] = []
    try:
        if config.log_folder is not None:
            observers.append(_create_run_folder(config))
        if config.log.tensorboard is not None:
            observers.append(_create_tensorboard(config))
        observers += create_loggers(config)
    except BaseException:
        for observer in observers:
            observer.close()
        raise
    return observers


def _create_run_folder(config: Config) -> RunFolder:
    """Create the run folder. If the config does not name one, a failure does not end the run."""
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


def _create_tensorboard(config: Config) -> Observer:
    try:
        from rpcmp.observability.tensorboard import TensorBoard
    except ImportError as error:
        raise ConfigError(
            "log.tensorboard needs TensorBoard: pip install 'rpcmp[tensorboard]'"
        ) from error
    return TensorBoard(config)


@contextlib.contextmanager
def report_run_folder(observers: Sequence[Observer], report: Report) -> Iterator[Report]:
    """Report the event `kept`, with the run folder, at the end of a run that has started."""
    has_started, generation = False, 0

    def report_event(event: Event) -> None:
        nonlocal has_started, generation
        has_started |= isinstance(event, FIRST_EVENTS)
        generation = generation if event.generation is None else event.generation
        report(event)

    try:
        yield report_event
    finally:
        path = run_folder_path(observers)
        if has_started and path is not None:
            report(KeptEvent(path=str(path)).stamped(time.time(), generation))


def run_folder_path(observers: Sequence[Observer]) -> Path | None:
    paths = (observer.path for observer in observers if isinstance(observer, RunFolder))
    return next(paths, None)


def timeline_interval(observers: Sequence[Observer]) -> float:
    """Return the seconds between timelines; 0 for none. A run folder alone keeps few of them."""
    if not observers:
        return 0.0
    is_watched = not all(isinstance(observer, RunFolder) for observer in observers)
    return SHOWN_SECONDS if is_watched else KEPT_SECONDS


@contextlib.contextmanager
def serve_page(
    job: Config, ui: str | None, observers: list[Observer], show: Report
) -> Iterator[None]:
    """Serve the run's page, if `ui` is given: show its address, and add it to the observers."""
    if ui is None:
        yield
        return
    # Only runs with a page need its libraries.
    from rpcmp.observability.dashboard.page_server import Endpoint, LivePage

    endpoint = Endpoint.open(None if ui == ANY_PORT else ui, job.certs_folder)
    page = LivePage(endpoint)
    observers.append(page)
    # Not to observers: the address may contain a token.
    show(UiEvent(url=endpoint.url).stamped(time.time(), 1))
    try:
        yield
    finally:
        page.close()


@contextlib.contextmanager
def serve_metrics(job: Config, address: str | None, observers: list[Observer]) -> Iterator[None]:
    """Serve the run's metrics at `address`, if it is given, and add them to the observers."""
    if address is None:
        yield
        return
    # Only runs with metrics need their libraries.
    from rpcmp.net.security import Security
    from rpcmp.observability.prometheus import serving
    from rpcmp.observability.run_metrics import RunMetrics

    metrics = RunMetrics()
    security = Security(job.certs_folder, job.security.insecure)
    with serving(metrics.store, address, security) as url:
        echo(f"metrics at {url}", err=True)
        observers.append(metrics)
        yield
