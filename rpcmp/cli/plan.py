"""`rpcmp plan`: decide which hosts serve what."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpcmp.cli import echo
from rpcmp.cli.options import config_argument, require_writable
from rpcmp.config import addresses as address_book
from rpcmp.config import loader
from rpcmp.config.files import read_bytes
from rpcmp.config.planned_file import planned, written
from rpcmp.config.types import format_size, parse_size
from rpcmp.errors import ConfigError

if TYPE_CHECKING:
    from rpcmp.config.schema import Config
    from rpcmp.pipelining.plan import HostLoss, Plan
    from rpcmp.tools.planning import PlanningResult, Wishes

SECURITY = "security."
"""Begins the overrides that --certs and --insecure stand for."""

WIDTH = 140
"""Characters that a row of a table may take."""


@click.command()
@config_argument
@click.option(
    "--connect",
    metavar="HOST:PORT[*N],...",
    help="Running servers, started with --spare; *N: N of them at this port and those after it, as "
    "on a host with N GPUs. Without it: the addresses and spares of CONFIG.",
)
@click.option(
    "--use", metavar="HOST:PORT", multiple=True, help="A server that has to take part. Repeatable."
)
@click.option(
    "--without", metavar="HOST:PORT", multiple=True, help="One that must not. Repeatable."
)
@click.option(
    "--memory",
    metavar="HOST:PORT=SIZE",
    multiple=True,
    help='The most that a worker may use there, such as "4GiB". Repeatable.',
)
@click.option(
    "--link-budget",
    metavar="HOST:PORT,HOST:PORT=SIZE",
    multiple=True,
    help="The most that may pass between two of them in a step. Repeatable.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write CONFIG with the best plan, beside it.",
)
@click.option(
    "--simulate",
    "simulates",
    is_flag=True,
    help="CONFIG describes a cluster that need not exist; see `rpcmp guide clusters`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    config: Path,
    overrides: tuple[str, ...],
    connect: str | None,
    use: tuple[str, ...],
    without: tuple[str, ...],
    memory: tuple[str, ...],
    link_budget: tuple[str, ...],
    output: Path | None,
    simulates: bool,
    as_json: bool,
) -> None:
    """Decide which of the given hosts serve which layers of CONFIG.

    Measures the layers and the memory on every host, and the links between them, and shows the best
    three plans: the stages in order, with the time of a step, memory, and what passes over each
    link; which hosts stand by; what losing each host would cost. Up to ten hosts the slowest part
    of a step is the fastest possible; with more, the hosts are chosen by hill climbing. A few steps
    are trained and dropped.

    \b
    Example:
      rpcmp plan config.toml --connect a:50051,b:50051,c:50051 -o planned.toml
    """
    if simulates:
        own = [override for override in overrides if not override.startswith(SECURITY)]
        if any((own, connect, use, without, memory, link_budget, output)):
            raise click.UsageError("--simulate goes with no other option than --json")
        _simulate(config, as_json)
        return
    from rpcmp.tools import planning

    job = loader.load_config(config, overrides)
    text = read_bytes(config, loader.MAX_CONFIG).decode()
    wishes = planning.Wishes(
        use, without, dict(map(_memory, memory)), dict(map(_budget, link_budget))
    ).with_limits_of(job)
    if output is not None:
        _require_beside(output, config)
        require_writable(output)
    found = asyncio.run(planning.plan(job, _servers(connect, job), wishes))
    if output is not None:
        planned_text = _planned_text(text, overrides, found, wishes)
        output.write_text(planned_text, encoding="utf-8")
        if _num_comments(planned_text) < _num_comments(text):
            found.notes.append(f"{output} is written anew: some comments of {config} are lost")
    if as_json:
        echo(json.dumps(found.as_json()))
        return
    _show(found)
    if output is not None:
        echo(f"the first plan is in {output}: rpcmp drive {output}")


def _simulate(path: Path, as_json: bool) -> None:
    from rpcmp.cli.console import print_wide, table
    from rpcmp.tools.cluster_simulation import HEADS, cells, load, outlook

    cluster = load(path)
    found = [outlook(cluster, number) for number in cluster.stages]
    if as_json:
        echo(json.dumps([asdict(each) for each in found]))
        return
    rows = [tuple(cells(each)) for each in found]
    print_wide(table(HEADS, rows, right=HEADS, pad_edge=False), WIDTH)
    for each in found:
        for wall in each.walls:
            echo(f"{each.stages} stages: {wall}")


def _servers(connect: str | None, config: Config) -> list[str]:
    if connect is None:
        found = [*config.addresses, *config.recovery.spares]
    else:
        parts = [part.strip() for part in connect.split(",") if part.strip()]
        found = [address for part in parts for address in _expanded(part)]
    if not found:
        raise ConfigError("plan needs running servers: give their addresses by --connect")
    return found


def _num_comments(text: str) -> int:
    return sum(line.lstrip().startswith("#") for line in text.splitlines())


def _expanded(part: str) -> Iterator[str]:
    """Yield the addresses that one part of --connect stands for."""
    address, star, count = part.partition("*")
    host, port = address_book.parse(address.strip())
    if star and not re.fullmatch(r"[1-9]\d{0,2}", count.strip()):
        raise ConfigError(f"--connect {part!r}: write HOST:PORT*N for N servers")
    for number in range(int(count) if star else 1):
        each = address_book.format_address(host, port + number)
        address_book.parse(each)  # the port may be too large
        yield each


def _memory(text: str) -> tuple[str, int]:
    address, _, size = text.rpartition("=")
    if not address:
        raise ConfigError(f"--memory {text!r}: write HOST:PORT=SIZE, such as a:50051=4GiB")
    return address.strip(), parse_size(size.strip())


def _budget(text: str) -> tuple[frozenset[str], int]:
    pair, _, size = text.rpartition("=")
    ends = frozenset(part.strip() for part in pair.split(",") if part.strip())
    if len(ends) != 2:
        raise ConfigError(
            f"--link-budget {text!r}: write two servers and a size, such as a:50051,b:50051=10MB"
        )
    return ends, parse_size(size.strip())


def _require_beside(output: Path, config: Path) -> None:
    """Check that the job's code and data will be found from there, too."""
    if output.resolve() == config.resolve():
        raise ConfigError(f"{output} is CONFIG itself: give another name, to keep it")
    if output.is_symlink() or output.parent.resolve() != config.parent.resolve():
        raise ConfigError(
            f"{output} would lie elsewhere than {config}, and a job's files are looked for beside "
            f"its config: write it to {config.parent / output.name}"
        )


def _planned_text(
    text: str, overrides: tuple[str, ...], found: PlanningResult, wishes: Wishes
) -> str:
    data: dict[str, Any] = {"name": found.config.name, **tomllib.loads(text)}
    for override in overrides:
        if not override.startswith(SECURITY):  # of --certs and --insecure, which drive takes too
            loader.apply_override(data, override)
    best = found.plans[0]
    settings = found.settings.model_dump(exclude_unset=True)
    stages = [
        {"addresses": [stage.address]}
        | ({"memory": f"{size} B"} if (size := wishes.memory.get(stage.address)) else {})
        | settings
        for stage in best.stages
    ]
    comment = (
        f"Planned by `rpcmp plan` for {len(found.hosts)} hosts: a step takes about "
        f"{best.step_s * 1e3:,.1f} ms with {best.options}"
    )
    return written(text, planned(data, best.balance, stages, best.spares), comment)


def _show(found: PlanningResult) -> None:
    from rpcmp.cli.console import print_wide, table

    for number, each in enumerate(found.plans, start=1):
        echo(f"{'' if number == 1 else chr(10)}plan {number}: {_head(each)}")
        heads = ("stage", "host", "layers", "computes", "memory", "may have", "sends on", "if lost")
        rows = list(_rows(each))
        print_wide(table(heads, rows, right=heads[2:6], pad_edge=False), WIDTH)
        if each.spares:
            echo(f"spares: {', '.join(each.spares)}")
        if each.unused:
            echo(f"too small to stand by: {', '.join(each.unused)}")
    for note in found.notes:
        echo(f"note: {note}")


def _head(plan: Plan) -> str:
    count = len(plan.stages)
    stages = f"{count} stage{'' if count == 1 else 's'}"
    how = ", as tried," if plan.is_rehearsed else ", as predicted,"
    return (
        f"{plan.step_s * 1e3:,.1f} ms a step{how} in {stages}, which idle {plan.bubble:.0%}; "
        f"balance = {plan.balance}, {plan.options}"
    )


def _rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    links = [
        f"{format_size(link.step_bytes)} a step, {link.busy_s * 1e3:,.1f} ms" for link in plan.links
    ]
    for index, (stage, link, loss) in enumerate(
        zip(plan.stages, [*links, ""], plan.losses, strict=True)
    ):
        start, end = stage.layers
        yield (
            str(index),
            stage.address,
            f"{start}-{end - 1}" if end - start > 1 else str(start),
            f"{stage.busy_s * 1e3:,.1f} ms",
            format_size(stage.memory_bytes),
            "" if stage.limit_bytes is None else format_size(stage.limit_bytes),
            link,
            _cost(loss),
        )


def _cost(loss: HostLoss) -> str:
    if loss.spare is not None:
        return f"{loss.spare} takes over: {(loss.step_s or 0.0) * 1e3:,.1f} ms"
    if loss.step_s is None:
        return "waits for it: no plan near this one does without it"
    return f"waits for it; without it: {loss.step_s * 1e3:,.1f} ms"
