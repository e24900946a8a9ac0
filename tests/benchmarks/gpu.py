"""The classic table of model parallelism: ResNet-50 on one device, split in two, and pipelined.

    python -m tests.benchmarks.gpu [--devices cuda:0,cuda:1] [--plot gpu.svg]

A mini-batch is 120 images, 128 x 128 pixels, 1,000 classes. Prints, in Markdown, a row for each of
- one device: the whole model and mini-batch there;
- naive split: the two halves on two devices, of which one always waits for the other;
- rpcmp, and torch.distributed.pipelining with 1F1B (over NCCL on CUDA): the same halves, for each
  size of a micro-batch;
- DataParallel: the whole model on each device, half a mini-batch for each;
with mean and deviation of 10 runs of 3 steps, after one to warm up. With one device both halves are
on it, and the last two cannot run, as the output says. Contestants run one after the other, each
alone, as their models might not fit side by side. They share the time that --minutes gives: with
little of it there are fewer runs, and what was not measured is named. Those with micro-batches of
one size must have one loss. Nothing else should run meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, RpcmpError
from rpcmp.pipelining import devices
from rpcmp.tools.bench.cases import Case
from rpcmp.tools.bench.contestants import Contestant, OwnPipeline, PeerGroup
from tests.support.places import ROOT

SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)
"""Samples of a micro-batch."""

BATCH = 120

JOB = """
name = "classic"
ship_code = false
schedule = "1f1b"
loss = "torch.nn:CrossEntropyLoss"
optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.001 } }
[model]
layers = "rpcmp.examples.resnet50:layers"
kwargs = { classes = 1000 }
balance = [11, 11]
[data]
min_microbatch = 1 # whatever layers want: a split is what it says
[data.train]
callable = "tests.benchmarks.gpu_trainers:images"
kwargs = { samples = 360, classes = 1000, size = 128 }
"""

TOLERANCE = 0.02
"""Relative, of first losses: cuDNN may round the factors of convolutions to 11 bits."""


@dataclass(frozen=True)
class Row:
    """Measurements of a contestant.

    Attributes:
        split: samples that go through the model at once, on each device.
        seconds: of a step, in each run.
        loss: of the first step.
    """

    name: str
    split: int
    seconds: list[float]
    loss: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seconds)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.seconds) if len(self.seconds) > 1 else 0.0


def job(batch: int, split: int, overrides: Sequence[str], places: Sequence[str]) -> Config:
    """Return the job with micro-batches of `split` samples, and a stage on each of `places`."""
    data = tomllib.loads(JOB)
    data["data"]["batch_size"], data["num_microbatches"] = batch, batch // split
    data["stages"] = [{"device": place} for place in places]
    for override in overrides:
        loader.apply_override(data, override)
    return loader.parse_config(data).with_folder(ROOT)


def contestants(
    batch: int, splits: Sequence[int], overrides: Sequence[str], places: Sequence[str]
) -> Iterator[tuple[int, Contestant]]:
    """Yield each that can run with its split, in the order of the table."""

    def ours(split: int) -> Contestant:
        config = job(batch, split, overrides, places)
        return OwnPipeline(Case("rpcmp", config, config, None, is_frozen=False))

    def theirs(
        name: str, trainer: str, split: int, own: Sequence[str], ranks: int = 1
    ) -> PeerGroup:
        config = job(batch, split, overrides, ["cpu"] * len(places))  # they move it themselves
        told = {"config": config.model_dump(mode="json", exclude_unset=True), "devices": [*own]}
        ways = {"way": ["the only one"]}
        trainer = f"tests.benchmarks.gpu_trainers:{trainer}"
        return PeerGroup(name, trainer, told, str(ROOT), [1] * ranks, ways)

    yield batch, theirs("one device", "Trainer", batch, [places[0]] * len(places))
    yield batch, theirs("naive split", "Trainer", batch, places)
    for split in splits:
        yield split, ours(split)
    if needs_more(places):
        return
    for split in splits:
        yield split, theirs("torch pipelining", "TorchPipeline", split, places, len(places))
    yield math.ceil(batch / len(places)), theirs("DataParallel", "DataParallel", batch, places)


def needs_more(places: Sequence[str]) -> str:
    """Return which contestants need more devices than there are, if any; the CPU is as many."""
    if len({*places}) == len(places) or places[0] == "cpu":
        return ""
    return "without torch pipelining and DataParallel, which need two devices: here is one"


async def measure(one: Contestant, split: int, runs: int, steps: int, limit: float) -> Row:
    """Warm a contestant up, and measure it.

    Args:
        limit: seconds after which no run begins but the first.

    Raises:
        RpcmpError: it cannot train this job on these devices.
    """
    ends, seconds = time.monotonic() + limit, list[float]()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(one.close)
        await one.start()
        first = await one.run(steps)
        while not seconds or (len(seconds) < runs and time.monotonic() < ends):
            seconds.append((await one.run(steps)).seconds_per_step)
    return Row(one.name, split, seconds, first.losses[0])


HEADS = (
    *("", "samples at once", "runs"),
    *("s per step", "deviation", "samples per s", "times one device"),
)


def cells(row: Row, batch: int, one_device: Row | None) -> list[str]:
    times = f"{one_device.mean / row.mean:.2f}" if one_device else ""
    figures = [f"{row.mean:.4f}", f"{row.deviation:.4f}", f"{batch / row.mean:.1f}", times]
    return [row.name, str(row.split), str(len(row.seconds)), *figures]


def line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def best_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Describe the best of each that was tried with several splits, and losses that differ."""
    for name in dict.fromkeys(row.name for row in rows):
        found = [row for row in rows if row.name == name]
        if len(found) > 1:
            best = min(found, key=lambda row: row.mean)
            yield f"best of {name}: {best.mean:.4f} s with {best.split} samples a micro-batch"
    for row in rows:
        first = next(each for each in rows if each.split == row.split)
        if not math.isclose(first.loss, row.loss, rel_tol=TOLERANCE):
            yield (
                f"{row.name} and {first.name}, {row.split} samples at once, do not train the same: "
                f"their first losses are {row.loss:.4f} and {first.loss:.4f}"
            )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of a step over the split, in a format by the file's suffix."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7, 4.5), layout="constrained")
    axes = drawn.add_subplot()
    for colour, name in enumerate(dict.fromkeys(row.name for row in rows)):
        found = [row for row in rows if row.name == name]
        means, style = [row.mean for row in found], f"C{colour}"
        if len(found) > 1:
            splits, errors = [row.split for row in found], [row.deviation for row in found]
            axes.errorbar(splits, means, errors, marker=".", capsize=3, color=style, label=name)
        else:
            axes.axhline(means[0], linestyle="--", color=style, label=name)
    axes.set_xlabel("samples a micro-batch")
    axes.set_ylabel("s per step")
    axes.set_ylim(bottom=0)
    axes.legend()
    drawn.savefig(path)


def numbers(context: Any, parameter: Any, text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise click.BadParameter(f"{text} is no list of sizes such as 1,3,5")
    return found


@click.command()
@click.option("--devices", "names", help="Two, such as cuda:0,cuda:1; by default what torch finds.")
@click.option("--batch", type=click.IntRange(min=2), default=BATCH, show_default=True)
@click.option("--splits", callback=numbers, default=",".join(map(str, SPLITS)), show_default=True)
@click.option("--runs", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="A run.")
@click.option(
    "--minutes", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Of all runs."
)
@click.option("--set", "overrides", multiple=True, help="KEY=VALUE of the job.")
@click.option("--plot", "path", type=click.Path(path_type=Path), help="Draw the curve there.")
def main(
    names: str | None,
    batch: int,
    splits: Sequence[int],
    runs: int,
    steps: int,
    minutes: float,
    overrides: Sequence[str],
    path: Path | None,
) -> None:
    """Measure, and print the table."""
    found = names.split(",") if names else devices.existing()[1:]
    if not found:
        raise click.UsageError("torch finds no accelerator here: --devices cpu,cpu tries the CPU")
    if wrong := [split for split in splits if batch % split]:
        raise click.UsageError(f"--batch {batch} has no equal micro-batches of {wrong[0]} samples")
    places = [found[0], found[1 % len(found)]]
    shown = ", ".join(
        f"{place} ({devices.device_name(devices.resolve_device(place))})" for place in places
    )
    print(f"{shown}; {batch} samples a step; up to {runs} runs of {steps} steps\n")
    print(line(HEADS), line(["---"] * len(HEADS)), sep="\n", flush=True)
    rows, notes = list[Row](), [note for note in [needs_more(places)] if note]
    ends, every = time.monotonic() + 60 * minutes, [*contestants(batch, splits, overrides, places)]
    for done, (split, one) in enumerate(every):
        if (seconds := (ends - time.monotonic()) / (len(every) - done)) <= 0:
            notes.append(
                f"without {one.name}, {split} samples at once: {minutes:g} minutes are over"
            )
            continue
        try:
            rows.append(asyncio.run(measure(one, split, runs, steps, seconds)))
        except ConfigError as error:
            raise click.ClickException(str(error)) from error
        except RpcmpError as error:  # such as a library that has no such device
            notes.append(
                f"without {one.name}, {split} samples at once: {str(error).splitlines()[0]}"
            )
        else:
            first = rows[0] if rows[0].name == "one device" else None
            print(line(cells(rows[-1], batch, first)), flush=True)
    print("", *best_lines(rows), *notes, sep="\n")
    if path is not None:
        plot(rows, path)


if __name__ == "__main__":
    main()
