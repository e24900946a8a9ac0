"""`rpcmp certs`: certificates for the hosts of a job."""

from __future__ import annotations

import re
from pathlib import Path

import click

from rpcmp.cli.terminal import echo
from rpcmp.errors import SecurityError

DAYS = 365


@click.group()
def certs() -> None:
    """Make certificates with a private authority, or look at one.

    \b
    Examples:
      rpcmp certs init certs --host host-a --host host-b
      rpcmp certs issue certs --name stage2 --host host-c
    """


@certs.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--host", "hosts", multiple=True, help="Host of the next stage, from stage 0 on.")
def init(folder: Path, hosts: tuple[str, ...]) -> None:
    """Make a certificate authority in DIR, and with it certificates for the driver and the hosts.

    Copy each host its own folder, such as DIR/stage1, and nothing else: whoever has DIR/ca.key can
    be anybody.

    \b
    Example:
      rpcmp certs init certs --host host-a --host host-b
    """
    from rpcmp.wire import authority, role

    authority.create(folder)
    made = [authority.issue(folder, "driver", role.DRIVER, [], DAYS)]
    made += [
        authority.issue(folder, f"stage{index}", role.stage(index), [host], DAYS)
        for index, host in enumerate(hosts)
    ]
    echo(f"{folder} has a certificate authority, {', '.join(path.name for path in made)}")


@certs.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--name", help='Of the folder in DIR; "stage1" is for stage 1.')
@click.option("--host", "hosts", multiple=True, help="Name or IP address of its host. Repeatable.")
@click.option("--stage", type=click.IntRange(min=0), help="Which stage, where the name says none.")
@click.option("--spare", is_flag=True, help="For a server that may take any stage.")
@click.option("--driver", is_flag=True, help="For `rpcmp drive`.")
@click.option("--days", type=click.IntRange(min=1), default=DAYS, show_default=True)
def issue(
    folder: Path,
    name: str | None,
    hosts: tuple[str, ...],
    stage: int | None,
    spare: bool,
    driver: bool,
    days: int,
) -> None:
    """Issue a certificate for one host, or renew it.

    Copy the folder that it makes to the host, and give it to `rpcmp serve` or `rpcmp drive` as
    --certs. What runs takes up renewed files by itself.

    \b
    Examples:
      rpcmp certs issue certs --name stage1 --host host-b --host 192.0.2.7
      rpcmp certs issue certs --driver
    """
    from rpcmp.wire import authority, role

    named = re.fullmatch(r"stage(\d+)", name or "")
    if stage is None and named and not (spare or driver):
        stage = int(named[1])
    if [stage is not None, spare, driver].count(True) != 1:
        raise click.UsageError("give --name stageN, or one of --stage N, --spare and --driver")
    if driver:
        kind = role.DRIVER
    elif spare:
        kind = role.SPARE
    else:
        assert stage is not None
        kind = role.stage(stage)
    if not driver and not hosts:
        raise click.UsageError("a server is reached at a --host, which its certificate has to name")
    name = name or (f"stage{stage}" if stage is not None else kind.kind)
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("."):
        raise SecurityError(f"--name {name!r} is no name of a folder")
    issued = authority.issue(folder, name, kind, hosts, days)
    echo(f"{issued} is for {kind}{f' at {chr(44).join(hosts)}' if hosts else ''}")


@certs.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
def show(folder: Path) -> None:
    """Say what the certificate in DIR is good for.

    \b
    Example:
      rpcmp certs show certs/stage1
    """
    from rpcmp.wire.certificate import Certificate
    from rpcmp.wire.credentials import Credentials

    found = Certificate.load(folder)
    Credentials(folder)
    echo(f"role   {found.role or 'none'}")
    echo(f"hosts  {', '.join(found.hosts) or 'none'}")
    echo(f"valid  {found.not_before:%Y-%m-%d %H:%M} to {found.not_after:%Y-%m-%d %H:%M} UTC")
