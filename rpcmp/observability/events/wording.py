"""The wording of events for people: the same on the terminal, on the page and in a report.

`python -m rpcmp.observability.events.wording` prints the table of all events and their keys, which
the guide has.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpcmp.config.types import format_size
from rpcmp.observability import events


@dataclass
class RunContext:
    """The values of earlier events that the wording of an event needs.

    Attributes:
        name: the job's name.
        schedule: its pipeline schedule.
        workers: the workers by label.
        give_up_after: seconds that the run waits for a lost server; None if unknown.
        steps: optimizer steps of the whole run.
        first_loss: loss of the first step; None before.
        saves: whether it writes checkpoints, so that a Ctrl-C loses nothing.
    """

    name: str = ""
    schedule: str = ""
    workers: dict[str, events.WorkerInfo] = field(default_factory=dict)
    give_up_after: float | None = None
    steps: int = 0
    first_loss: float | None = None
    saves: bool = False

    def add(self, event: events.Event) -> None:
        """Update the context with the next event of the run."""
        match event:
            case events.RunEvent():
                self.name, self.schedule = event.name, str(event.config.get("schedule", ""))
                if self.schedule == "auto":  # it changes: the event `schedule` has what to
                    self.schedule = ""
                self.workers = {worker["label"]: worker for worker in event.workers}
                self.saves = event.config.get("checkpoint") is not None
                recovery = event.config.get("recovery")  # of a file, it may be anything
                limit = recovery.get("give_up_after") if isinstance(recovery, dict) else None
                self.give_up_after = limit if isinstance(limit, int | float) else None
            case events.StagesEvent():
                self.workers = {worker["label"]: worker for worker in event.workers}
            case events.StartEvent():
                self.steps = event.steps
            case events.StepEvent() if self.first_loss is None:
                self.first_loss = event.loss


def describe(event: events.Event, run: RunContext) -> str:
    """Describe an event in one line; empty for an event that people are not shown.

    Only what a config's `report` returned, and what a process has logged, may have several lines.

    Args:
        event: the event.
        run: of the events before it, this one included.
    """
    match event:
        case events.UiEvent():
            return f"page: {event.url}"
        case events.MeasuringEvent():
            return "measuring the hosts before the first step"
        case events.PlanEvent():
            without = "" if event.is_rehearsed else ", without messages and loading"
            return (
                f"balance = {event.balance}  predicted: step {_ms(event.step_s)}{without}  "
                f"bubble {event.bubble:.0%}"
            )
        case events.SharesEvent():
            of_stages = (f"{name} {':'.join(map(str, s))}" for name, s in event.shares.items())
            return f"replicas share micro-batches: {', '.join(of_stages)}"
        case events.GenerationEvent():
            return f"generation {event.generation} starts after step {event.step}"
        case events.StartEvent():
            name = f"{run.name}: " if run.name else ""
            schedule = f", {run.schedule}" if run.schedule else ""
            where = f"{schedule}, stages {', '.join(run.workers)}" if run.workers else ""
            return f"{name}{event.steps} steps{where}"
        case events.StepEvent():
            return (
                f"step {event.step}/{run.steps}  epoch {event.epoch}  loss {event.loss:.4f}  "
                f"{event.samples_per_s:,.0f} samples/s{describe_busy(event)}  "
                f"data {event.data_share:.0%}{describe_loss_scale(event)}"
            )
        case events.ScheduleEvent():
            return _schedule(event)
        case events.EvalEvent():
            return f"evaluation after step {event.step}: {_numbers(event.values)}"
        case events.EarlyStopEvent():
            return _early_stop(event)
        case events.ReportEvent():
            return event.text
        case events.CheckpointEvent():
            cost = f"{format_size(event.bytes)} in {event.seconds:.1f} s"
            return f"checkpoint of step {event.step} in {event.path}: {cost}"
        case events.BestEvent():
            value = f"{event.metric} {event.value:.4f}"
            return f"the best so far is kept: step {event.step}, {value}"
        case events.FaultEvent():
            return f"lost after step {event.step}: {event.error}"
        case events.RecoveredEvent():
            return (
                f"continuing after step {event.step} as generation {event.generation}, "
                f"after {event.seconds:.1f} s"
            )
        case events.WaitingEvent():
            return _waiting(event, run)
        case events.ReplacedEvent():
            return (
                f"the spare at {event.address} takes stage {event.stage!r}, whose server at "
                f"{event.lost} is gone"
            )
        case events.StagesEvent():
            names = [stage["name"] for stage in event.graph["stages"]]
            return f"the stages are now {', '.join(names)}"
        case events.RebalanceEvent():
            return _rebalance(event, run)
        case events.ResumedEvent():
            if not event.step:
                return "no checkpoint to resume from: starting from the beginning"
            if event.is_complete:
                return f"the run had ended, after step {event.step}; --fresh starts another one"
            changed = f" (changed since: {', '.join(event.changed)})" if event.changed else ""
            where = ", from what the stage servers hold" if event.from_memory else ""
            return f"resuming after step {event.step}{where}{changed}"
        case events.WarningEvent():
            return f"warning: {event.text}"
        case events.LogEvent():
            more = f" (x {event.count})" if event.count > 1 else ""
            return f"{event.logger}: {event.text}{more}".removeprefix(": ")
        case events.SummaryEvent():
            return _summary(event, run)
        case events.KeptEvent():
            return f"kept in {_short(event.path)}"
        case events.EndEvent():
            return f"the run has ended, {event.outcome}" + (
                f": {event.error}" if event.error else ""
            )
    return ""


def describe_details(event: events.Event) -> Iterator[str]:
    """Describe the details of a plan or a summary, in further lines."""
    match event:
        case events.PlanEvent():
            width = max(map(len, event.stages))
            for name, stage in event.stages.items():
                limit = stage["limit_bytes"]
                of = "" if limit is None else f" of {format_size(limit)}"
                spent = stage["messages_s"]
                messages = f"  messages {_ms(spent)}" if event.is_rehearsed else ""
                yield (
                    f"  {name:{width}}  {stage['num_layers']} layers  computes "
                    f"{_ms(stage['busy_s'])}{messages}  bubble {stage['bubble']:.0%}  "
                    f"memory {format_size(stage['memory_bytes'])}{of}"
                )
        case events.SummaryEvent():
            if (best := event.best) is not None:
                value = f"{best['metric']} {best['value']:.4f}"
                yield f"best step {best['step']}, {value}, in {best['path']}"
            yield f"peak memory {_memory(event.memory)}"
            if event.plan is not None:
                yield _plan_outcome(event.plan)
            yield f"parameters sha256 {event.parameters_sha256}"


def describe_busy(event: events.StepEvent) -> str:
    """Describe how busy the stages were; empty if they were lost before they could report it."""
    shares = " ".join(f"{share:.0%}" for share in event.busy.values())
    return f"  busy {shares}" if shares else ""


def describe_loss_scale(event: events.StepEvent) -> str:
    """Describe the loss scale of a step; empty without loss scaling."""
    if event.loss_scale is None:
        return ""
    this = ", this one" if event.is_skipped else ""
    skipped = f"  skipped {event.skipped_steps}{this}" if event.skipped_steps else ""
    return f"  scale {event.loss_scale:g}{skipped}"


def _schedule(event: events.ScheduleEvent) -> str:
    if not event.measured:
        return f"schedule: starts with {event.chosen}"
    times = {words: f"{words} {_ms(seconds)}" for words, seconds in event.measured.items()}
    kept = times.pop(event.chosen, event.chosen)
    return f"schedule: {kept} a step; tried: {', '.join(times.values())}"


def _early_stop(event: events.EarlyStopEvent) -> str:
    waited = f"{event.waited} evaluation" + ("s" if event.waited > 1 else "")
    if event.best is None:
        return f"stopped early after step {event.step}: {event.metric} was NaN in {waited}"
    best = f"{event.metric} {event.best:.4f} after step {event.best_step}"
    return (
        f"stopped early after step {event.step}: {waited} in a row brought nothing better "
        f"than {best}"
    )


def _waiting(event: events.WaitingEvent, run: RunContext) -> str:
    server = f"the server of stage {event.stage!r} at {event.address}"
    worker: Mapping[str, Any] = run.workers.get(event.stage, {})
    index = worker.get("stage_index")
    if index is None or run.give_up_after is None:
        return f"waiting for {server}"
    has_replicas = worker["label"] != worker.get("stage")
    replica = f" --replica {worker.get('replica')}" if has_replicas else ""
    return (
        f"waiting up to {run.give_up_after:g} s for {server}: restart it with the options that it "
        f"had, such as `rpcmp serve --stage {index}{replica}`"
    )


def _rebalance(event: events.RebalanceEvent, run: RunContext) -> str:
    balance = f"balance = {event.balance}"
    match event.outcome:
        case "moved":
            change = f"{balance} instead of {event.before}"
            return f"layers have moved in {event.seconds:.1f} s: {change}: {event.reason}"
        case "undone":
            return f"{balance} is back, after {event.seconds:.1f} s: {event.reason}"
        case _:
            setting = f"--set 'model.{balance.replace(' ', '')}'"
            advice = f"give `{setting}` to the next run: this one has no [checkpoint] to go on from"
            if run.saves:
                advice = f"stop the run, and go on with `--resume {setting}`"
            return f"warning: {event.reason} with {balance} instead of {event.before}: {advice}"


def _summary(event: events.SummaryEvent, run: RunContext) -> str:
    skipped = "" if event.skipped_steps is None else f" ({event.skipped_steps} skipped)"
    first = "" if run.first_loss is None else f"{run.first_loss:.4f} -> "
    metrics = f", {_numbers(event.metrics, 'test ')}" if event.metrics else ""
    ended = "stopped after" if event.is_cut_short else "done:"
    return f"{ended} {event.steps} steps{skipped}, loss {first}{event.loss:.4f}{metrics}"


def _plan_outcome(plan: events.PlanOutcome) -> str:
    seconds = plan["measured_step_s"]
    measured = "" if seconds is None else f", measured {_ms(seconds)} (median)"
    wrong = f"; {plan['wrong']}" if plan["wrong"] else ""
    predicted = _ms(plan["predicted_step_s"])
    return f"balance = {plan['balance']}: predicted step {predicted}{measured}{wrong}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _short(path: str) -> str:
    """Return a path relative to the working directory, if it is below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _numbers(values: Mapping[str, float], prefix: str = "") -> str:
    return ", ".join(f"{prefix}{name} {value:.4f}" for name, value in values.items())


def _memory(memory: Mapping[str, events.Memory]) -> str:
    return ", ".join(
        f"{stage} {sizes['peak'] / 2**20:,.0f} MiB (idle {sizes['idle'] / 2**20:,.0f})"
        for stage, sizes in memory.items()
    )


TYPE_NAMES = {
    "str": "string",
    "Literal": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "list",
}


def table() -> str:
    """Return all events with their keys, as Markdown, from the docstrings of their classes."""
    rows = ["| event, key | type | meaning |", "| --- | --- | --- |"]
    for kind in events.EVENTS.values():
        rows += _rows(kind)
    return "\n".join(rows)


def _rows(kind: type[events.Event]) -> Iterator[str]:
    when, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    attributes = re.sub(r"\n {8}", " ", attributes)
    meanings = dict(re.findall(r"^    (\w+): (.*)$", attributes, re.MULTILINE))
    yield f"| **`{kind.event}`** | event | {when} |"
    for own in events.own_fields(kind):
        key, annotation = own.name, str(own.type)
        if key == kind.FLAT:
            key, annotation = "NAME", "float"
        type_ = TYPE_NAMES.get(annotation.partition("[")[0].removesuffix(" | None"), "table")
        yield f"| `{kind.event}.{key}` | {type_} | {meanings[own.name]} |"


if __name__ == "__main__":
    print(table())
