"""`rpcmp explain`: show what a run will do, before it does it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rpcmp.cli import echo
from rpcmp.cli.options import addresses_of, config_argument, connect_option
from rpcmp.config import loader
from rpcmp.config.types import format_size

if TYPE_CHECKING:
    from rpcmp.cli.console import Cell
    from rpcmp.pipelining.cost_model import Prediction
    from rpcmp.tools.explain.gather import Cut, Explanation
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
    how long the step will take; listeners and connections; which files are read and written.
    Layers are measured for some seconds, on this machine or on the stage servers that CONFIG or
    --connect name, and a few steps are trained there and dropped. Nothing is written.

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


def _print(explanation: Explanation) -> None:
    from rpcmp.cli.console import Console, table
    from rpcmp.tools.job_links import FREE_PORT

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)

    def print_lines(lines: Iterable[str]) -> None:
        for line in lines:
            console.print(line, soft_wrap=True)

    def print_section(title: str) -> None:
        console.print()
        console.print(title, style="bold")

    stages = explanation.stages
    print_lines(_head(explanation))
    heads: tuple[str, ...] = ("#", "stage", "reads", "runs", "layers", "parameters")
    rows = [
        (
            str(stage.index),
            stage.name,
            ", ".join(stage.inputs),
            _place(stage),
            _layers(stage),
            _parameters(stage),
        )
        for stage in stages
    ]
    console.print(table(heads, rows, right=("parameters",), pad_edge=False))

    if explanation.cuts:
        print_section("Where the module can be cut")
        heads = ("after", "before", "used", "a sample carries", "of")
        cuts = [
            (one.after, one.before, "yes" if one.is_used else "", *_carried(one))
            for one in explanation.cuts
        ]
        console.print(table(heads, cuts, right=("a sample carries",), pad_edge=False))

    print_section("Memory of each worker")
    sizes = ("process", "parameters", "gradients", "optimizer", "activations", "together")
    heads = ("stage", *sizes, "may have", "snapshots")
    console.print(table(heads, map(_memory, stages), right=heads[1:], pad_edge=False))
    print_lines(_memory_notes(stages))

    print_section("One step")
    print_lines(_step(explanation, console.width))

    print_section("Listeners")
    heads = ("process", "address", "accepts", "open to other users of its host")
    listeners = [
        (one.stage, one.address or FREE_PORT, one.admits, _exposed(one.exposed))
        for one in explanation.listeners
    ]
    listeners.append(("driver", "none, except for --ui and --metrics", "-", "-"))
    console.print(table(heads, listeners, pad_edge=False))

    print_section("Connections")
    links = [
        (
            f"{link.one} - {link.other}",
            "; ".join(f"{one} -> {other}" for one, other in link.dials) or "none",
            ", ".join(link.carries),
            _transport(link),
        )
        for link in explanation.links
    ]
    console.print(table(("between", "opened", "carries", "transport"), links, pad_edge=False))

    print_section("Files")
    files = [
        (file.what, file.path, (file.text, "bold red" if file.is_in_the_way else ""))
        for file in explanation.files
    ]
    console.print(table(("what", "where", "use"), files, pad_edge=False))
    print_lines(f"note: {note}" for note in explanation.notes)


def _carried(cut: Cut) -> tuple[str, str]:
    """Return how much passes, and of what: equal values once, with their number."""
    counts = Counter(cut.values)
    values = (f"{number} x {value}" if number > 1 else value for value, number in counts.items())
    return format_size(cut.sample_bytes), ", ".join(values)


def _head(explanation: Explanation) -> Iterator[str]:
    steps = "an unknown number of steps"
    if explanation.steps is not None:
        steps = f"{explanation.steps:,} steps"
    train = explanation.batches.get("train")
    if explanation.epochs is not None and train is not None:
        steps += f", {_count(explanation.epochs, 'epoch')} of {_count(train, 'mini-batch', 'es')}"
    microbatches = _count(explanation.num_microbatches, "micro-batch", "es")
    if explanation.microbatches_per_message > 1:
        microbatches += f", {explanation.microbatches_per_message} a message"
    yield (
        f"{explanation.name}: {steps}, mini-batches of {explanation.batch_size} samples in "
        f"{microbatches}, {explanation.schedule}"
    )
    if explanation.tries:
        yield f"the first steps try other values of {', '.join(explanation.tries)}"
    stages = _count(len(explanation.stages), "stage")
    balance = f", balance = {explanation.balance}" if explanation.balance else ""
    yield f"{_count(explanation.parameters, 'parameter')} in {stages}{balance}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _place(stage: ExplainedStage) -> str:
    place = ", ".join(stage.addresses) or "here"
    if stage.replicas > 1 and not stage.addresses:
        place = f"{stage.replicas} replicas here"
    if stage.shares:
        place += f", sharing {':'.join(map(str, stage.shares))}"
    settings = [stage.device]
    settings += [f"{stage.threads} threads"] if stage.threads > 1 else []
    settings += [stage.autocast] if stage.autocast else []
    settings += ["recompute"] if stage.recompute else []
    settings += ["compiled"] if stage.compiles else []
    return f"{place} ({', '.join(settings)})"


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


def _memory(stage: ExplainedStage) -> Sequence[Cell]:
    memory = stage.memory
    total = f"{'' if memory.is_whole else 'over '}{format_size(memory.total)}"
    return (
        stage.name,
        _size(memory.process),
        _size(memory.parameters + memory.buffers),
        _size(memory.gradients),
        _size(memory.optimizer),
        _size(memory.activations),
        (total, "bold red" if memory.is_too_much else ""),
        _size(memory.limit),
        _size(memory.snapshots),
    )


def _size(size: int | None) -> str:
    return "?" if size is None else format_size(size)


def _memory_notes(stages: Sequence[ExplainedStage]) -> Iterator[str]:
    in_flight = ", ".join(f"{stage.name} {stage.in_flight}" for stage in stages)
    yield f"activations: of the micro-batches that can be in flight at once: {in_flight}"
    if any(stage.memory.snapshots for stage in stages):
        yield "snapshots: kept by the stage's supervisor, to recover from a fault"
    for stage in stages:
        if stage.memory.is_too_much:
            yield (
                f"{stage.name} will not fit: take more stages, smaller micro-batches, a smaller "
                "max_in_flight, or recompute = true"
            )


def _step(explanation: Explanation, width: int) -> Iterator[str]:
    from rpcmp.tools.explain.schedule_picture import picture

    stages, runs = explanation.stages, explanation.runs
    predicted = explanation.prediction
    if predicted is None:
        yield "nothing was measured: drawn as if both gradients each took as long as a forward"
    else:
        yield (
            f"predicted {predicted.step_s * 1e3:,.1f} ms, in which stages idle "
            f"{predicted.bubble:.0%}; {_basis(predicted)}"
        )
        for name, stage in predicted.stages.items():
            spent = stage.messages_s * 1e3
            messages = f"messages take {spent:,.1f} ms, " if predicted.is_rehearsed else ""
            yield (
                f"  {name}: computes {stage.busy_s * 1e3:,.1f} ms, {messages}"
                f"idles {stage.bubble:.0%}"
            )
    yield ""
    yield from picture(runs, [stage.name for stage in stages], width)
    yield ""
    last = len(stages) - 1
    kinds = {run.action.value for actions in runs.values() for run in actions}
    split = ", B its input's gradient, W its weights' gradients" if "W" in kinds else ", B backward"
    numbered = "messages" if explanation.microbatches_per_message > 1 else "micro-batches"
    yield f"F forward{split}, by numbers of {numbered}; F0 of stage {last} is the action {last}F0"
    if any(stage.replicas > 1 for stage in stages):
        yield "a stage's replicas are drawn as one, which is as fast as the last of them"


def _basis(predicted: Prediction) -> str:
    if predicted.is_rehearsed:
        return "from some steps of the job, trained here and dropped"
    return "from the layers alone, without messages and the loading of data"


def _exposed(reason: str | None) -> str:
    if reason is None:
        return "unknown; rpcmp doctor asks the host"
    if reason:
        return f"its worker too: {reason}"
    return "nothing else: its worker has a network of its own"


def _transport(link: StageLink) -> str:
    scope = "between hosts" if link.crosses_hosts else "within one machine"
    if not link.dials:
        return f"{scope}, in memory or over a private loopback"
    if link.is_encrypted:
        return f"{scope}, TLS 1.3"
    return f"{scope}, IN THE CLEAR" if link.crosses_hosts else scope
