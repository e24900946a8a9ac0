"""`rpcmp certs`: certificates for the hosts of a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from rpcmp.cli import echo
from rpcmp.errors import SecurityError
from rpcmp.net.identity import CA, CRL

DAYS = 30
CA_DAYS = 730
MIN_CA_DAYS = 2 * DAYS
"""An authority that is renewed at half of its life always outlives what it issues."""

folder_argument = click.argument(
    "folder", metavar="DIR", type=click.Path(path_type=Path, file_okay=False)
)
days_option = click.option("--days", type=click.IntRange(min=1), default=DAYS, show_default=True)


@click.group()
def certs() -> None:
    """Make certificates with a private authority, or look at one.

    \b
    Examples:
      rpcmp certs init certs --host host-a --host host-b
      rpcmp certs issue certs --name stage2 --host host-c
      rpcmp certs renew certs
    """


@certs.command()
@folder_argument
@click.option(
    "--host",
    "hosts",
    multiple=True,
    help="Host of the next stage, starting with stage 0. Repeatable.",
)
@click.option(
    "--permit",
    "permitted",
    metavar="NAME",
    multiple=True,
    help="Another domain, host, address or network that the authority may certify. Repeatable.",
)
@days_option
@click.option(
    "--ca-days",
    type=click.IntRange(min=MIN_CA_DAYS),
    default=CA_DAYS,
    show_default=True,
    help="How long the authority is valid.",
)
def init(
    folder: Path, hosts: tuple[str, ...], permitted: tuple[str, ...], days: int, ca_days: int
) -> None:
    """Make a certificate authority in DIR, and with it certificates for the driver and the hosts.

    Copy its own folder to each host, such as DIR/stage1, and nothing else: the holder of DIR/ca.key
    can impersonate any host of the job. The authority certifies only the domains and private
    networks of the hosts, so that a browser may trust it.

    \b
    Examples:
      rpcmp certs init certs --host host-a --host host-b
      rpcmp certs init certs --host gpu1.lab.example --permit 192.0.2.0/24
    """
    from rpcmp.net import authority, identity

    if days > ca_days:
        raise click.UsageError("--days is more than --ca-days")
    authority.create(folder, hosts, permitted, ca_days)
    made = [authority.issue(folder, "driver", identity.DRIVER, [], days)]
    made += [
        authority.issue(folder, f"stage{index}", identity.stage(index), [host], days)
        for index, host in enumerate(hosts)
    ]
    echo(f"{folder} has a certificate authority, {', '.join(path.name for path in made)}")


@certs.command()
@folder_argument
@click.option("--name", help='Name of the folder in DIR; "stage1" is for stage 1.')
@click.option("--host", "hosts", multiple=True, help="Name or IP address of its host. Repeatable.")
@click.option(
    "--stage", type=click.IntRange(min=0), help="Index of the stage, if --name does not tell."
)
@click.option("--spare", is_flag=True, help="For a server that may take any stage.")
@click.option("--driver", is_flag=True, help="For `rpcmp drive`.")
@days_option
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

    Copy the new folder to the host, and pass it to `rpcmp serve` or `rpcmp drive` as --certs.
    Running processes load renewed files by themselves. A host that the authority may not certify
    yet extends the authority; the other hosts then need its new ca.crt.

    \b
    Examples:
      rpcmp certs issue certs --name stage1 --host host-b --host 192.0.2.7
      rpcmp certs issue certs --driver
    """
    from rpcmp.net import authority, identity

    named = re.fullmatch(r"stage(\d+)", name or "")
    if stage is None and named and not (spare or driver):
        stage = int(named[1])
    roles = [identity.stage(stage)] if stage is not None else []
    roles += [identity.SPARE] if spare else []
    roles += [identity.DRIVER] if driver else []
    if len(roles) != 1:
        raise click.UsageError("give --name stageN, or one of --stage N, --spare and --driver")
    (role,) = roles
    if not driver and not hosts:
        raise click.UsageError("a server is reached at a --host, which its certificate has to name")
    name = name or str(role).replace(" ", "")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("."):
        raise SecurityError(f"--name {name!r} is no name of a folder")
    is_wider = authority.permit(folder, hosts)
    issued = authority.issue(folder, name, role, hosts, days)
    echo(f"{issued} is for {role}{_at(hosts)}")
    if is_wider:
        echo(
            f"{folder / CA} is new, and permits {', '.join(hosts)}: copy it to all other hosts, "
            "into the folder of their --certs. Until then they refuse the new host"
        )


@certs.command()
@folder_argument
@click.argument("names", metavar="[NAME]...", nargs=-1)
@days_option
def renew(folder: Path, names: tuple[str, ...], days: int) -> None:
    """Renew the certificates in DIR, for the same roles and hosts, with fresh keys.

    By default all certificates in DIR that are not revoked. The authority itself is renewed when
    less than half of its lifetime is left. Copy the folders to their hosts; running processes load
    them by themselves.

    \b
    Examples:
      rpcmp certs renew certs
      rpcmp certs renew certs stage1 driver
    """
    from rpcmp.net import authority
    from rpcmp.net.certificates import Certificate

    known = [path.name for path in authority.Authority.load(folder).issued]
    if missing := [name for name in names if name not in known]:
        raise SecurityError(f"{folder} has no certificate called {missing[0]!r}; it has {known}")
    if authority.renew(folder):
        echo(f"{folder / CA} is new: copy it to all hosts before the old one expires")
    for name in names or known:
        if not names and authority.is_revoked(folder, name):
            echo(f"{folder / name} is revoked, so not renewed: `rpcmp certs issue` it again")
            continue
        certificate = Certificate.load(folder / name)
        if certificate.role is None:
            raise SecurityError(f"{certificate.path} has no role, so it cannot be renewed")
        issued = authority.issue(folder, name, certificate.role, certificate.hosts, days)
        until = f"{Certificate.load(issued).not_after:%Y-%m-%d}"
        where = certificate.hosts[0] if certificate.hosts else "the driver's host"
        purpose = f"{certificate.role}{_at(certificate.hosts)}, until {until}"
        echo(f"{issued} is for {purpose}: copy it to {where}")


@certs.command()
@folder_argument
@click.argument("name")
def revoke(folder: Path, name: str) -> None:
    """Revoke all certificates that were issued under NAME, such as stage1 or driver.

    Copy DIR/ca.crl to every host, into the folder of its --certs. Running processes load it by
    themselves: they refuse the certificates, and close the connections of their holders. NAME can
    be issued again.

    \b
    Example:
      rpcmp certs revoke certs stage1
    """
    from rpcmp.net import authority

    number = authority.revoke(folder, name)
    which = "1 certificate" if number == 1 else f"{number} certificates"
    echo(
        f"{which} of {name} revoked: copy {folder / CRL} to every host, into the folder of its "
        "--certs. What has no copy of it still accepts them"
    )
    if authority.Authority.load(folder).permitted is None:
        echo(
            f"{folder} was made by rpcmp 0.1.0, which kept no record: certificates that it issued "
            f"as {name} before the one in {folder / name} are not revoked"
        )


@certs.command()
@folder_argument
def show(folder: Path) -> None:
    """Show the role and validity of the certificate in DIR, and what its authority may certify.

    \b
    Example:
      rpcmp certs show certs/stage1
    """
    from rpcmp.net.certificates import Certificate, authority_text
    from rpcmp.net.security import Credentials

    certificate = Certificate.load(folder)
    revocations = Credentials(folder).revocations
    echo(f"role   {certificate.role or 'none'}")
    echo(f"hosts  {', '.join(certificate.hosts) or 'none'}")
    now, state = datetime.now(UTC), ""
    if now > certificate.not_after:
        state = ", expired"
    elif now < certificate.not_before:
        state = ", not yet"
    period = (
        f"{certificate.not_before:%Y-%m-%d %H:%M} to {certificate.not_after:%Y-%m-%d %H:%M} UTC"
    )
    echo(f"valid  {period}{state}")
    echo(f"trusts {authority_text(folder)}")
    if revocations is not None:
        echo(f"revoked by {CRL}: {revocations.number}")


def _at(hosts: Sequence[str]) -> str:
    return f" at {', '.join(hosts)}" if hosts else ""
