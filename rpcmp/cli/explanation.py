"""What `rpcmp explain` shows: one section after the other, tables and a picture."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from rpcmp.cli.console import Console
from rpcmp.config.types import format_size
from rpcmp.tools.explain.gather import Explanation
from rpcmp.tools.explain.schedule_picture import picture
from rpcmp.tools.explain.stage_estimates import ExplainedStage
from rpcmp.tools.job_links import FREE_PORT, StageLink

WIDTH = 140
"""Characters of a line where nobody looks at a terminal."""

LAYERS = 4
"""Names of layers that a row has at most."""


def show(found: Explanation) -> None:
    """Print all of it."""
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


def _table(*heads: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left", overflow="fold")
    return table


def _stages(found: Explanation) -> Table:
    table = _table("#", "stage", "reads", "runs", "layers", "parameters", right=("parameters",))
    for stage in found.stages:
        table.add_row(
            str(stage.index),
            stage.name,
            ", ".join(stage.inputs),
            _place(stage),
            _layers(stage),
            _parameters(stage),
        )
    return table


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
    heads = ("process", "parameters", "gradients", "optimizer", "activations", "together")
    table = _table(
        "stage", *heads, "may have", "snapshots", right=(*heads, "may have", "snapshots")
    )
    for stage in stages:
        memory = stage.memory
        together = Text(f"{'' if memory.is_whole else 'over '}{format_size(memory.total)}")
        table.add_row(
            stage.name,
            _size(memory.process),
            _size(memory.parameters + memory.buffers),
            _size(memory.gradients),
            _size(memory.optimizer),
            _size(memory.activations),
            Text.assemble(together, style="bold red" if memory.is_too_much else ""),
            _size(memory.limit),
            _size(memory.snapshots),
        )
    return table


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
    yield from picture(found.step.runs, [stage.name for stage in found.stages], width)
    yield ""
    last = len(found.stages) - 1
    kinds = {run.action.value for runs in found.step.runs.values() for run in runs}
    split = ", B its input's gradient, W its weights' gradients" if "W" in kinds else ", B backward"
    what = "messages" if found.microbatches_per_message > 1 else "micro-batches"
    yield f"F forward{split}, by numbers of {what}; F0 of stage {last} is the action {last}F0"
    if any(stage.replicas > 1 for stage in found.stages):
        yield "a stage's replicas are drawn as one, which is as fast as the last of them"


def _listeners(found: Explanation) -> Table:
    table = _table("who", "where", "who is let in", "others on its host reach")
    for one in found.listeners:
        address = FREE_PORT if one.address is None else one.address
        table.add_row(one.stage, address, one.admits, _exposed(one.exposed))
    table.add_row("driver", "nowhere, but for --ui and --metrics", "nobody: it dials", "-")
    return table


def _exposed(reason: str | None) -> str:
    if reason is None:
        return "not asked; rpcmp doctor tells"
    if reason:
        return f"its worker too: {reason}"
    return "nothing else: its worker has a network of its own"


def _ways(found: Explanation) -> Table:
    table = _table("who", "dials", "for", "how")
    for way in found.links:
        dials = "; ".join(f"{one} -> {other}" for one, other in way.dials)
        table.add_row(
            f"{way.one} - {way.other}", dials or "nobody", ", ".join(way.carries), _how(way)
        )
    return table


def _how(way: StageLink) -> str:
    where = "between hosts" if way.crosses_hosts else "within one machine"
    if not way.dials:
        return f"{where}, in memory or by a loopback of their own"
    if way.is_encrypted:
        return f"{where}, TLS 1.3"
    return f"{where}, IN THE CLEAR" if way.crosses_hosts else where


def _files(found: Explanation) -> Table:
    table = _table("what", "where", "who and when")
    for file in found.files:
        style = "bold red" if file.is_in_the_way else ""
        table.add_row(file.what, file.path, Text(file.text, style))
    return table
