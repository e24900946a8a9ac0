"""`rpcmp verify`: compare a pipelined run with one process, bit for bit."""

from __future__ import annotations

from pathlib import Path

import click

from rpcmp.cli import echo
from rpcmp.cli.options import addresses_of, config_argument, connect_option
from rpcmp.config import loader


@click.command()
@config_argument
@connect_option
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--whole-batch/--no-whole-batch",
    default=True,
    help="Say how far a loop over whole mini-batches is away as well.",
)
def verify(
    config: Path,
    overrides: tuple[str, ...],
    connect: str | None,
    steps: int,
    whole_batch: bool,
) -> None:
    """Train CONFIG on stages and in one process, and compare bits.

    Compares each step's loss and every final parameter and buffer. Exits 1 and names the first
    difference, if there is one. A loop over whole mini-batches adds up in another order: how far it
    is away is said, where the model is the same without micro-batches.

    \b
    Example:
      rpcmp verify config.toml --steps 5
    """
    from rpcmp.tools.verification import verify as run

    job = loader.load_config(config, (*overrides, f"steps={steps}"))
    result = run(job, addresses_of(connect, job), whole_batch)
    for caveat in result.caveats:
        echo(f"note: {caveat}")
    if result.skipped:
        echo(f"skipped: {result.skipped} of {result.steps} steps, whose gradients were not finite")
    if result.difference is not None:
        echo(
            f"different, as wire_dtype = {job.wire_dtype!r} makes it: losses by up to "
            f"{result.difference.loss:.1e}, parameters and buffers by "
            f"{result.difference.parameters:.1e} (relative) after {result.steps} steps"
        )
        return
    echo(
        f"identical: {result.steps} losses and {result.num_tensors} tensors "
        f"({result.num_elements:,} numbers), bit for bit"
    )
    if result.whole is not None:
        echo(
            f"whole mini-batches: losses by up to {result.whole.loss:.1e}, parameters and buffers "
            f"by {result.whole.parameters:.1e} (relative)"
        )
    elif whole_batch and result.depends_on_parts:
        echo(f"whole mini-batches: another model, by {result.depends_on_parts}")
    echo(f"parameters sha256 {result.parameters_sha256}")
