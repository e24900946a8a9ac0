"""`rpcmp explain`: show what a run will do, before it does it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rpcmp.cli.options import addresses_of, config_argument, connect_option
from rpcmp.cli.terminal import echo
from rpcmp.config import loader
from rpcmp.config.types import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from rpcmp.cli.console import Console
    from rpcmp.tools.explain.gather import Explanation
    from rpcmp.tools.explain.model_summary import ExplainedStage
    from rpcmp.tools.job_links import StageLink

WIDTH = 140
"""Characters of a line when the output is not a terminal."""

LAYERS = 4
"""Names of layers that a row has at most."""


@click.command()
@config_argument
@connect_option
@click.option(
    "--no-measure",
    is_flag=True,
    help="Measure nothing and contact no servers, which need not run. Without a prediction.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain(
    config: Path,
    overrides: tuple[str, ...],
    connect: str | None,
    no_measure: bool,
    as_json: bool,
) -> None:
    """Show what a run of CONFIG will do.

    Shows the stages with their layers, parameters and memory; a diagram of one step's schedule and
    how long the step will take; who listens and who dials whom; which files are read and written.
    Layers are measured for some seconds, on this machine or on the stage servers that CONFIG or
    --connect name. Nothing is trained or written.

    \b
    Example:
      rpcmp explain config.toml --set schedule=zero-bubble
    """
    from rpcmp.tools.explain.gather import explain as run

    job = loader.load_config(config, overrides)
    explanation = asyncio.run(run(job, addresses_of(connect, job), measures=not no_measure))
    if as_json:
        echo(json.dumps(explanation.as_json()))
    else:
        _print(explanation)


def _print(found: Explanation) -> None:
    from rpcmp.cli.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for line in _head(found):
        console.print(line, soft_wrap=True)
    console.print(_stages(found))
    _section(console, "Memory of each worker")
    console.print(_memory(found.stages))
    for line in _memory_notes(found.stages):
        console.print(line, soft_wrap=True)
    _section(console, "One step")
    for line in _step(found, console.width):
        console.print(line, soft_wrap=True)
    _section(console, "Who listens")
    console.print(_listeners(found))
    _section(console, "Who talks to whom")
    console.print(_ways(found))
    _section(console, "Files")
    console.print(_files(found))
    for note in found.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(title, style="bold")


def _head(found: Explanation) -> Iterator[str]:
    steps = "an unknown number of steps" if found.steps is None else f"{found.steps:,} steps"
    train = found.batches.get("train")
    each = f"{found.batch_size} samples"
    if found.epochs is not None and train is not None:
        steps += f", {_count(found.epochs, 'epoch')} of {_count(train, 'mini-batch', 'es')}"
    yield f"{found.name}: {steps}, mini-batches of {each} in {_microbatches(found)}"
    yield (
        f"{_count(found.parameters, 'parameter')} in {_count(len(found.stages), 'stage')}"
        + (f", balance = {found.balance}" if found.balance else "")
    )


def _microbatches(found: Explanation) -> str:
    text = _count(found.num_microbatches, "micro-batch", "es")
    if found.microbatches_per_message > 1:
        text += f", {found.microbatches_per_message} a message"
    return f"{text}, {found.schedule}"


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


def _stages(found: Explanation) -> Table:
    from rpcmp.cli.console import table

    heads = ("#", "stage", "reads", "runs", "layers", "parameters")
    rows = [
        (
            str(stage.index),
            stage.name,
            ", ".join(stage.inputs),
            _place(stage),
            _layers(stage),
            _parameters(stage),
        )
        for stage in found.stages
    ]
    return table(heads, rows, right=("parameters",), pad_edge=False)


def _place(stage: ExplainedStage) -> str:
    where = ", ".join(stage.addresses) or "here"
    if stage.replicas > 1 and not stage.addresses:
        where = f"{stage.replicas} replicas here"
    if stage.shares:
        where += f", sharing {':'.join(map(str, stage.shares))}"
    how = [stage.device, *([f"{stage.threads} threads"] if stage.threads > 1 else [])]
    how += [stage.autocast] if stage.autocast else []
    how += ["recompute"] if stage.recompute else []
    return f"{where} ({', '.join(how)})"


def _layers(stage: ExplainedStage) -> str:
    names = [layer.name for layer in stage.layers]
    if len(names) > LAYERS:
        names = [*names[: LAYERS - 2], "...", names[-1]]
    return f"{len(stage.layers)}: {', '.join(names)}"


def _parameters(stage: ExplainedStage) -> str:
    text = f"{stage.parameters:,}"
    if stage.frozen and stage.parameters:
        text += " frozen"
    if stage.tied:
        text += f", of these tied: {', '.join(stage.tied)}"
    return text


def _memory(stages: list[ExplainedStage]) -> Table:
    from rpcmp.cli.console import table

    sizes = ("process", "parameters", "gradients", "optimizer", "activations", "together")
    heads = (*sizes, "may have", "snapshots")
    rows = []
    for stage in stages:
        memory = stage.memory
        together = f"{'' if memory.is_whole else 'over '}{format_size(memory.total)}"
        row = (
            stage.name,
            _size(memory.process),
            _size(memory.parameters + memory.buffers),
            _size(memory.gradients),
            _size(memory.optimizer),
            _size(memory.activations),
            (together, "bold red" if memory.is_too_much else ""),
            _size(memory.limit),
            _size(memory.snapshots),
        )
        rows.append(row)
    return table(("stage", *heads), rows, right=heads, pad_edge=False)


def _memory_notes(stages: list[ExplainedStage]) -> Iterator[str]:
    held = ", ".join(f"{stage.name} {stage.in_flight}" for stage in stages)
    yield f"activations: of the micro-batches that may be in flight at once: {held}"
    if any(stage.memory.snapshots for stage in stages):
        yield "snapshots: what its supervisor keeps, to go on from when something is lost"
    for stage in stages:
        if stage.memory.is_too_much:
            yield (
                f"{stage.name} will not fit: take more stages, smaller micro-batches, a smaller "
                "max_in_flight, or recompute = true"
            )


def _size(size: int | None) -> str:
    return "?" if size is None else format_size(size)


def _step(found: Explanation, width: int) -> Iterator[str]:
    from rpcmp.tools.explain.schedule_picture import picture

    predicted = found.prediction
    if predicted is None:
        yield "nothing was measured: drawn as if both gradients each took as long as a forward"
    else:
        yield (
            f"predicted {predicted.step_s * 1e3:,.1f} ms, in which stages idle "
            f"{predicted.bubble:.0%}; without transfers between hosts and the loading of data"
        )
        for name, stage in predicted.stages.items():
            yield f"  {name}: computes {stage.busy_s * 1e3:,.1f} ms, idles {stage.bubble:.0%}"
    yield ""
    yield from picture(found.runs, [stage.name for stage in found.stages], width)
    yield ""
    last = len(found.stages) - 1
    kinds = {run.action.value for runs in found.runs.values() for run in runs}
    split = ", B its input's gradient, W its weights' gradients" if "W" in kinds else ", B backward"
    what = "messages" if found.microbatches_per_message > 1 else "micro-batches"
    yield f"F forward{split}, by numbers of {what}; F0 of stage {last} is the action {last}F0"
    if any(stage.replicas > 1 for stage in found.stages):
        yield "a stage's replicas are drawn as one, which is as fast as the last of them"


def _listeners(found: Explanation) -> Table:
    from rpcmp.cli.console import table
    from rpcmp.tools.job_links import FREE_PORT

    rows = [
        (
            one.stage,
            FREE_PORT if one.address is None else one.address,
            one.admits,
            _exposed(one.exposed),
        )
        for one in found.listeners
    ]
    rows.append(("driver", "nowhere, but for --ui and --metrics", "nobody: it dials", "-"))
    heads = ("who", "where", "who is let in", "others on its host reach")
    return table(heads, rows, pad_edge=False)


def _exposed(reason: str | None) -> str:
    if reason is None:
        return "not asked; rpcmp doctor tells"
    if reason:
        return f"its worker too: {reason}"
    return "nothing else: its worker has a network of its own"


def _ways(found: Explanation) -> Table:
    from rpcmp.cli.console import table

    rows = []
    for way in found.links:
        dials = "; ".join(f"{one} -> {other}" for one, other in way.dials) or "nobody"
        rows.append((f"{way.one} - {way.other}", dials, ", ".join(way.carries), _how(way)))
    return table(("who", "dials", "for", "how"), rows, pad_edge=False)


def _how(way: StageLink) -> str:
    where = "between hosts" if way.crosses_hosts else "within one machine"
    if not way.dials:
        return f"{where}, in memory or by a loopback of their own"
    if way.is_encrypted:
        return f"{where}, TLS 1.3"
    return f"{where}, IN THE CLEAR" if way.crosses_hosts else where


def _files(found: Explanation) -> Table:
    from rpcmp.cli.console import table

    rows = [
        (file.what, file.path, (file.text, "bold red" if file.is_in_the_way else ""))
        for file in found.files
    ]
    return table(("what", "where", "who and when"), rows, pad_edge=False)
