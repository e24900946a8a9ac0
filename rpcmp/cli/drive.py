"""`rpcmp drive`: train a model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rpcmp.cli.options import (
    addresses_of,
    config_argument,
    connect_option,
    log_options,
    metrics_option,
    require_writable,
    ui_option,
)
from rpcmp.process.fork_client import DRIVERS, WORKERS, Forks
from rpcmp.process.interpreter import no_lost_interrupt
from rpcmp.process.logging.collector import Display
from rpcmp.process.resources import raise_descriptor_limit

if TYPE_CHECKING:
    from rpcmp.job.restore_point import Start
    from rpcmp.observability.observers import Observer


@click.command()
@config_argument
@connect_option
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Train for this many optimizer steps, instead of epochs.",
)
@click.option(
    "--trace",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a trace for Perfetto, chrome://tracing and `rpcmp trace`; .gz compresses it.",
)
@ui_option
@metrics_option
@click.option(
    "--resume", is_flag=True, help="Continue from the newest checkpoint, if there is one."
)
@click.option("--fresh", is_flag=True, help="Start a new run beside the checkpoints of other runs.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line on standard output."
)
@click.option("-v", "--verbose", is_flag=True, help="Show every step.")
@click.option("-q", "--quiet", is_flag=True, help="Show only the summary.")
@log_options
def drive(
    config: Path,
    overrides: tuple[str, ...],
    connect: str | None,
    steps: int | None,
    trace: Path | None,
    ui: str | None,
    metrics: str | None,
    resume: bool,
    fresh: bool,
    as_json: bool,
    verbose: bool,
    quiet: bool,
    display: Display,
) -> None:
    """Train the model that CONFIG describes.

    Without addresses in CONFIG and without --connect, stage servers run on this machine as long as
    the job does. The first Ctrl-C stops after the running step, the second stops at once.

    \b
    Example:
      rpcmp drive config.toml --steps 100 --set data.batch_size=64
    """
    if resume and fresh:
        raise click.UsageError("--resume continues a run, --fresh starts one: give one of them")
    start: Start = "resume" if resume else "fresh" if fresh else "either"
    if steps is not None:
        overrides = (*overrides, f"steps={steps}")
    if trace is not None:
        trace = _unwritten(trace) if resume else trace
        require_writable(trace)
    raise_descriptor_limit()
    modules = [DRIVERS] if connect else [WORKERS, DRIVERS]
    with _importing_torch(modules) as (runner, forks):
        with no_lost_interrupt():
            from rpcmp.config import loader

            job = loader.load_config(config, overrides)
            servers = addresses_of(connect, job)
        if not servers and not job.addresses and len(job.workers) > 1:
            runner.run(forks.template.start())
        with no_lost_interrupt():
            from rpcmp.cli.observing import (
                create_observers,
                report_run_folder,
                run_folder_path,
                serve_metrics,
                serve_page,
                timeline_interval,
            )
            from rpcmp.cli.progress_output import event_printer, logged
            from rpcmp.job.training_run import drive as run
            from rpcmp.observability.events import LogEvent
            from rpcmp.observability.observers import in_background, watching
            from rpcmp.observability.run_folder import TRACE

        watchers: list[Observer] = []
        with (
            event_printer(as_json, verbose, quiet) as show,
            serve_metrics(job, metrics, watchers),
            in_background(logged(show, display)) as shown,
            serve_page(job, ui, watchers, shown),
            watching(watchers := [*watchers, *create_observers(job)], shown) as notify,
            report_run_folder(watchers, notify) as report,
            display.reporting(lambda entry: report(LogEvent.from_entry(entry))),
        ):
            folder = run_folder_path(watchers)
            training = run(
                *(job, report, servers),
                trace=trace,
                start=start,
                timeline=timeline_interval(watchers),
                last_steps=None if folder is None else folder / TRACE,
                forks=forks,
            )
            runner.run(training)


def _unwritten(trace: Path) -> Path:
    """Return a name for the trace of a run that goes on, beside what there is of it."""
    names = (trace.with_name(f"{trace.stem}-{part}{trace.suffix}") for part in itertools.count(2))
    return next(path for path in itertools.chain([trace], names) if not path.exists())


@contextlib.contextmanager
def _importing_torch(modules: Sequence[str]) -> Iterator[tuple[asyncio.Runner, Forks]]:
    """Start the fork server first of all: what it imports takes longer than all else here."""
    with asyncio.Runner() as runner:
        forks = runner.run(_started_forks(modules))
        try:
            yield runner, forks
        finally:
            runner.run(forks.close())


async def _started_forks(modules: Sequence[str]) -> Forks:
    forks = Forks(modules)
    await forks.start()
    return forks
