"""What `rpcmp drive` shows: a progress bar on a terminal, plain lines elsewhere, or JSON.

What `rpcmp drive` says of evaluations that were the best, or not better any more.

What `rpcmp drive` says of faults, recoveries and checkpoints: one line each.

The log of `rpcmp drive`: what the stages say and what its own process does, as it comes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rpcmp.cli.console import Console
from rpcmp.cli.terminal import echo
from rpcmp.config import validation
from rpcmp.config.schema import Config
from rpcmp.config.types import format_size
from rpcmp.observability import json_lines
from rpcmp.observability.observers import Report
from rpcmp.process.channel import Message
from rpcmp.process.logging.display import Display, RecordSource
from rpcmp.process.logging.records import as_text, visible


def best_line(event: Message) -> str:
    """One line for one event."""
    if event["event"] == "best":
        return f"the best so far is kept: step {event['step']}, {_value(event)}"
    waited = f"{event['waited']} evaluation" + ("s" if event["waited"] > 1 else "")
    if event["best"] is None:
        return f"stopped early after step {event['step']}: {event['metric']} was NaN in {waited}"
    found = f"{event['metric']} {event['best']:.4f} after step {event['best_step']}"
    return (
        f"stopped early after step {event['step']}: {waited} in a row brought nothing better "
        f"than {found}"
    )


def kept(best: dict[str, Any]) -> str:
    """Where the best checkpoint is."""
    return f"best step {best['step']}, {_value(best)}, in {best['path']}"


def _value(best: dict[str, Any]) -> str:
    return f"{best['metric']} {best['value']:.4f}"


def fault_line(event: Message) -> str:
    """One line for one event."""
    match event["event"]:
        case "fault":
            return f"lost after step {event['step']}: {event['error']}"
        case "recovered":
            return (
                f"going on from step {event['step']} as generation {event['generation']}, "
                f"after {event['seconds']:.1f} s"
            )
        case "waiting":
            return f"waiting for the server of stage {event['stage']!r} at {event['address']}"
        case "replaced":
            return (
                f"the spare at {event['address']} takes stage {event['stage']!r}, whose server at "
                f"{event['lost']} is gone"
            )
        case "resumed":
            return _resumed(event)
        case "checkpoint":
            return f"checkpoint of step {event['step']} in {event['path']}"
    return f"warning: {event['text']}"


def _resumed(event: Message) -> str:
    if not event["step"]:
        return "no checkpoint to resume from: starting from the beginning"
    changed = f" (changed since: {', '.join(event['changed'])})" if event["changed"] else ""
    return f"resuming after step {event['step']}{changed}"


PLAIN_SECONDS = 2.0
"""Between step lines where there is no terminal."""


@contextlib.contextmanager
def printer(config: Config, as_json: bool, verbose: bool, quiet: bool) -> Iterator[Report]:
    """What shows the events of a run."""
    if as_json:
        yield _show_json
        return
    console = Console()
    if console.is_terminal and not quiet and not verbose:
        with _bar(console) as progress:
            yield _Terminal(config, console, progress).show
        return
    yield _Plain(config, echo, every=0.0 if verbose else PLAIN_SECONDS, quiet=quiet).show


def _show_json(event: Message) -> None:
    echo(json_lines.dumps(event))


def plain(config: Config, write: Callable[[str], None]) -> Report:
    """What gives plain lines of the events of a run to `write`."""
    return _Plain(config, write, PLAIN_SECONDS, quiet=False).show


@dataclass
class _RunText:
    """What later lines have to know of what came before.

    Attributes:
        config: the job.
        steps: how many it will have done.
        first_loss: of the first step; None before.
    """

    config: Config
    steps: int = 0
    first_loss: float | None = None

    def note(self, event: Message) -> None:
        if event["event"] == "start":
            self.steps = event["steps"]
        if event["event"] == "step" and self.first_loss is None:
            self.first_loss = event["loss"]


class _Plain:
    """A line for the first and the last step, and for one every few seconds."""

    def __init__(
        self, config: Config, write: Callable[[str], None], every: float, quiet: bool
    ) -> None:
        self._run = _RunText(config)
        self._write = write
        self._every = every
        self._quiet = quiet
        self._shown = float("-inf")

    def show(self, event: Message) -> None:
        self._run.note(event)
        due = time.monotonic() - self._shown >= self._every
        if event["event"] == "step" and not due and event["step"] < self._run.steps:
            return
        if event["event"] == "step":
            self._shown = time.monotonic()
        if not self._quiet or event["event"] in ("summary", "ui"):
            for line in _lines(event, self._run):
                self._write(visible(line))


class _Terminal:
    """A progress bar; everything else scrolls by above it."""

    def __init__(self, config: Config, console: Console, progress: Progress) -> None:
        self._run = _RunText(config)
        self._console = console
        self._progress = progress
        self._task = progress.add_task("starting", total=None, loss="", speed="", busy="")

    def show(self, event: Message) -> None:
        self._run.note(event)
        match event["event"]:
            case "start":
                self._progress.update(self._task, total=self._run.steps, description="training")
            case "step":
                self._progress.update(
                    self._task,
                    completed=event["step"],
                    description=f"epoch {event['epoch']}",
                    loss=f"loss {event['loss']:.4f}",
                    speed=f"{event['samples_per_s']:,.0f} samples/s",
                    busy=f"{_busy(event)}{_scale(event)}".strip(),
                )
            case _:
                for line in _lines(event, self._run):
                    self._console.print(line, soft_wrap=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[busy]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _lines(event: Message, run: _RunText) -> Iterator[str]:
    match event["event"]:
        case "ui":
            yield f"page: {event['url']}"
        case "plan":
            yield from _plan(event)
        case "shares":
            for name, shares in event["shares"].items():
                yield f"replicas of {name} share micro-batches {':'.join(map(str, shares))}"
        case "start":
            where = ", ".join(worker.label for worker in run.config.workers)
            yield f"{run.config.name}: {run.steps} steps, {run.config.schedule}, stages {where}"
        case "step":
            yield (
                f"step {event['step']}/{run.steps}  epoch {event['epoch']}  "
                f"loss {event['loss']:.4f}  {event['samples_per_s']:,.0f} samples/s"
                f"{_busy(event)}  data {event['data_share']:.0%}{_scale(event)}"
            )
        case "eval":
            found = _numbers(validation.evaluation_values(event))
            yield f"evaluation after step {event['step']}: {found}"
        case "early_stop" | "best":
            yield best_line(event)
        case "report":
            yield event["text"]
        case "fault" | "recovered" | "waiting" | "replaced" | "resumed" | "checkpoint" | "warning":
            yield fault_line(event)
        case "kept":
            yield f"kept in {_near(event['path'])}"
        case "summary":
            yield (
                f"done: {event['steps']} steps{_skipped(event)}, "
                f"{_loss(run.first_loss, event['loss'])}"
                + (f", {_numbers(event['metrics'], 'test ')}" if event["metrics"] else "")
            )
            if "best" in event:
                yield kept(event["best"])
            yield f"peak memory {_memory(event['memory'])}"
            if "plan" in event:
                yield _compared(event["plan"])
            yield f"parameters sha256 {event['parameters_sha256']}"


def _loss(first: float | None, last: float) -> str:
    """Whether it has learned: the loss of the first step that was seen, and of the last."""
    return f"loss {last:.4f}" if first is None else f"loss {first:.4f} -> {last:.4f}"


def _scale(event: Message) -> str:
    """What a step's line says where the loss is scaled."""
    if "loss_scale" not in event:
        return ""
    this = ", this one" if event["is_skipped"] else ""
    skipped = event["skipped_steps"]
    of_them = f"  skipped {skipped}{this}" if skipped else ""
    return f"  scale {event['loss_scale']:g}{of_them}"


def _skipped(event: Message) -> str:
    """How many of a run's steps have updated nothing, where any could."""
    return f" ({event['skipped_steps']} skipped)" if "skipped_steps" in event else ""


def _plan(event: Message) -> Iterator[str]:
    """The balance that was measured, and what it promises."""
    yield (
        f"balance = {event['balance']}  predicted: step {_ms(event['step_s'])}  "
        f"bubble {event['bubble']:.0%}"
    )
    width = max(map(len, event["stages"]))
    for name, stage in event["stages"].items():
        limit = stage["limit_bytes"]
        of = "" if limit is None else f" of {format_size(limit)}"
        yield (
            f"  {name:{width}}  {stage['num_layers']} layers  computes {_ms(stage['busy_s'])}  "
            f"bubble {stage['bubble']:.0%}  memory {format_size(stage['memory_bytes'])}{of}"
        )


def _compared(plan: dict[str, Any]) -> str:
    measured = plan["measured_step_s"]
    found = "" if measured is None else f", measured {_ms(measured)} (median)"
    return f"balance = {plan['balance']}: predicted step {_ms(plan['predicted_step_s'])}{found}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _near(path: str) -> str:
    """A path as one would type it here."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _numbers(values: dict[str, Any], prefix: str = "") -> str:
    return ", ".join(f"{prefix}{name} {value:.4f}" for name, value in values.items())


def _memory(memory: dict[str, dict[str, int]]) -> str:
    return ", ".join(
        f"{stage} {bytes_['peak'] / 2**20:,.0f} MiB (idle {bytes_['idle'] / 2**20:,.0f})"
        for stage, bytes_ in memory.items()
    )


def _busy(event: Message) -> str:
    """Of a step whose stages were lost before they could tell nobody knows it."""
    shares = " ".join(f"{share:.0%}" for share in event["busy"].values())
    return f"  busy {shares}" if shares else ""


Show = Callable[[Message], None]


def with_log(show: Show, write: Callable[[str], None]) -> Show:
    """Have `show` write events, and the lines of the log between them, as in a terminal."""

    def show_both(event: Message) -> None:
        if event["event"] == "log":
            write(as_text(event))
        else:
            show(event)

    return show_both


def logged(show: Show, display: Display) -> Show:
    """Show the lines of the log among a run's events on `display`, and all events by `show`."""
    place = RecordSource("driver")
    display.place = lambda: place

    def show_logged(event: Message) -> None:
        nonlocal place
        generation = event.get("generation", place.generation)
        step = event["step"] if event["event"] == "step" else place.step
        place = RecordSource("driver", generation, step)
        if event["event"] == "log":
            display.show(event)
        show(event)

    return show_logged
