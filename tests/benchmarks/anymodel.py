"""Models that nobody has cut: what `[model] module` makes of them, and what torch's tracer does.

python -m tests.benchmarks.anymodel
python -m tests.benchmarks.anymodel --model llama --model t5

Each model of `tests.zoo.architectures` is cut and verified in two and in four stages, with `1f1b`
and `zero-bubble`, and an uneven last mini-batch. Beside it stands what the pieces of
`torch.distributed.pipelining.pipeline()`, cut at a block in the middle, give for the same samples,
and for one sample less. A model that the tracer cannot take may end its process, so each has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from rpcmp.splitting.split import split_module
from tests.zoo import architectures
from tests.zoo.architectures import ARCHITECTURES

RUNS = [(stages, schedule) for stages in (2, 4) for schedule in ("1f1b", "zero-bubble")]

SAMPLES = 5
LIMIT_SECONDS = 300.0


def sample(name: str, count: int) -> Any:
    """Return a batch of inputs."""
    batch = torch.utils.data.default_collate(architectures.data(name)[:count])
    return batch[0]


def cut(name: str) -> dict[str, Any]:
    """Return how long the module takes to be cut, and into how many layers."""
    module = architectures.module(name)
    started = time.perf_counter()
    split = split_module(module, sample(name, SAMPLES))
    return {"seconds": time.perf_counter() - started, "layers": [x.name for x in split.layers]}


class Plain(nn.Module):
    """A module that returns tensors alone, and keeps no cache: the tracer takes no other."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        if (config := getattr(module, "config", None)) is not None:  # transformers'
            config.use_cache = False

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return tuple(tensors(self.module(*args, **kwargs)))


def peer(name: str, at: str) -> str:
    """Return what the pieces of torch's tracer give, cut before the submodule `at`."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    module = Plain(architectures.module(name))
    for batch in (sample(name, SAMPLES), sample(name, SAMPLES - 1)):
        args, kwargs = _arguments(batch)
        if len(tensors(batch)[0]) == SAMPLES:
            split = {f"module.{at}": SplitPoint.BEGINNING}
            pipe = pipeline(module, mb_args=args, mb_kwargs=kwargs, split_spec=split)
        torch.manual_seed(7)
        expected = tensors(module(*args, **kwargs))
        torch.manual_seed(7)
        try:
            found = tensors(pipe(*args, **kwargs))
        except Exception as error:
            return f"{len(tensors(batch)[0])} samples: {_short(error)}"
        pairs = zip(found, expected, strict=False)
        if len(found) != len(expected) or not all(torch.equal(a, b) for a, b in pairs):
            return f"{len(tensors(batch)[0])} samples: other outputs"
    return "equal outputs"


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    children = value.values() if isinstance(value, Mapping) else value
    if not isinstance(children, str | bytes) and hasattr(children, "__iter__"):
        with contextlib.suppress(TypeError):
            return [tensor for child in children for tensor in tensors(child)]
    return []


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def verified(name: str, stages: int, schedule: str, folder: Path) -> str:
    """Return the first words of `rpcmp verify`."""
    config = folder / "job.toml"
    config.write_text(architectures.job(name, stages, schedule))
    command = [sys.executable, "-m", "rpcmp", "verify", str(config), "--steps", "3"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=environment
    )
    lines = (done.stdout + done.stderr).splitlines()
    found = [line for line in lines if line.startswith(("identical", "different", "rpcmp: "))]
    return found[0].partition(":")[0] if done.returncode == 0 else (found or lines)[-1]


def in_a_process(what: str, *arguments: str) -> Any:
    """Call a function of this module in a process of its own; returns its error as text."""
    code = (
        "import json, sys; from tests.benchmarks import anymodel; "
        f"print(json.dumps(anymodel.{what}(*sys.argv[1:])))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return last[:110]
    return json.loads(done.stdout.splitlines()[-1])


def rows(names: list[str]) -> Iterator[str]:
    yield "| model | cut in | layers | 2 and 4 stages, both schedules | torch's `pipeline()` |"
    yield "| --- | --- | --- | --- | --- |"
    for name in names:
        found = in_a_process("cut", name)
        if isinstance(found, str):
            yield f"| {name} | {found} | | | |"
            continue
        layers = found["layers"]
        with tempfile.TemporaryDirectory() as folder:
            results = {verified(name, *run, Path(folder)) for run in RUNS}
        theirs = in_a_process("peer", name, block_in_the_middle(name, layers))
        yield (
            f"| {name} | {found['seconds']:.1f} s | {len(layers)} | {'; '.join(sorted(results))} | "
            f"{theirs} |"
        )


def block_in_the_middle(name: str, layers: list[str]) -> str:
    """Return the layer, of those that are submodules, at which a cut makes two halves."""
    known = {path for path, _ in architectures.module(name).named_modules()}
    blocks = [layer for layer in layers[1:] if layer in known]
    return blocks[len(blocks) // 2]


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(list(ARCHITECTURES)))
def main(models: tuple[str, ...]) -> None:
    """Print a table of the models."""
    torch.set_num_threads(1)
    for row in rows(list(models or ARCHITECTURES)):
        click.echo(row)


if __name__ == "__main__":
    main()
