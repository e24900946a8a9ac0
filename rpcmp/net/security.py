"""How a process talks to others: with certificates, on its own machine only, or open to all.

It fails closed: without certificates everything stays on loopback, and there between the processes
of one user, unless the user explicitly asks for `insecure`.

Also watches certificates while a process runs: revoked peers, and the expiry of its own.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from rpcmp.config.addresses import parse
from rpcmp.errors import ConfigError, SecurityError
from rpcmp.net.identity import Credentials, Role
from rpcmp.net.tls import PeerConnection

INSECURE = (
    "insecure: nothing is encrypted, and whoever reaches a stage server runs code on its host"
)

WARN_SECONDS = 60.0
"""Interval of that warning."""


class Security:
    """A process's certificate and options.

    Args:
        certs: folder with its certificate; None: it has none.
        insecure: talk to other machines without one.

    Raises:
        SecurityError: the certificate cannot be used.
        ConfigError: both are given.
    """

    def __init__(self, certs: Path | None = None, insecure: bool = False) -> None:
        if certs is not None and insecure:
            raise ConfigError("give --certs or --insecure, not both")
        self.insecure = insecure
        self.credentials = None if certs is None else Credentials(certs)
        self._established: weakref.WeakSet[PeerConnection] = weakref.WeakSet()

    def establish(self, end: PeerConnection) -> None:
        """Register a verified connection, so that it can be ended if the peer is revoked.

        Raises:
            SecurityError: it has been revoked meanwhile.
        """
        if self._is_revoked(end):
            raise SecurityError("certificate revoked")
        self._established.add(end)

    def end_revoked(self) -> list[str]:
        """End the connections of revoked peers; return their roles."""
        revoked = [end for end in self._established if self._is_revoked(end)]
        for end in revoked:
            self._established.discard(end)
            end.shut_down()
        return [str(end.session.peer_role) for end in revoked if end.session is not None]

    def _is_revoked(self, end: PeerConnection) -> bool:
        revocations = None if self.credentials is None else self.credentials.revocations
        if revocations is None or end.session is None or end.gone.is_set():
            return False
        certificate = end.session.peer_certificate
        return certificate is not None and revocations.has(certificate)

    @property
    def role(self) -> Role | None:
        """The role in our certificate; None without certificates.

        Raises:
            SecurityError: the certificate has no role.
        """
        if self.credentials is None:
            return None
        from rpcmp.net.certificates import (
            Certificate,
        )  # cryptography is needed with certificates only

        certificate = Certificate.load(self.credentials.folder)
        if certificate.role is None:
            raise SecurityError(
                f"{certificate.path} has no role: among its alternative names there has to be one "
                "URI such as rpcmp://stage/1, rpcmp://spare or rpcmp://driver"
            )
        return certificate.role

    def require_allowed(self, addresses: Iterable[str]) -> None:
        """Refuse addresses on other machines, or that they could reach, without certificates.

        Raises:
            ConfigError: an address is not on loopback, and there is no certificate.
        """
        if self.credentials is not None or self.insecure:
            for address in addresses:
                parse(address)
            return
        for address in addresses:
            if not is_loopback(parse(address)[0]):
                raise ConfigError(
                    f"{address} is not a loopback address: whoever reaches a stage server runs "
                    "code on its host. Give --certs DIR, which `rpcmp certs issue` makes, so that "
                    "only the hosts of the job do; or --insecure, where nobody else is on the "
                    "network"
                )

    def require_valid(self) -> None:
        """Refuse to start with a certificate that peers would not accept.

        Raises:
            SecurityError: it has expired, or is not valid yet.
        """
        if self.credentials is None:
            return
        from rpcmp.net.certificates import (
            Certificate,
        )  # cryptography is needed with certificates only

        found, now = Certificate.load(self.credentials.folder), datetime.now(UTC)
        if now > found.not_after:
            raise SecurityError(
                f"{found.path} has expired on {found.not_after:%Y-%m-%d}, so that nobody would "
                "talk to us: renew it where its authority is, by `rpcmp certs renew DIR`, and copy "
                "it here"
            )
        if now < found.not_before:
            raise SecurityError(
                f"{found.path} is valid from {found.not_before:%Y-%m-%d %H:%M} UTC on, and here it "
                f"is {now:%Y-%m-%d %H:%M}: set one of the two clocks"
            )

    def require_may_serve(self, stage_index: int | None) -> None:
        """Refuse to serve a stage that our certificate is not for, or no longer.

        Raises:
            SecurityError: it is for another stage, or for the driver; it has expired.
        """
        self.require_valid()
        role = self.role
        if role is None:
            return
        if stage_index is None and role.kind != "spare":
            raise SecurityError(f"the certificate is for {role}, not for a spare")
        if not role.may_serve(stage_index):
            raise SecurityError(f"the certificate is for {role}, not for stage {stage_index}")

    def require_may_drive(self) -> None:
        """Refuse to drive with the certificate of a stage.

        Raises:
            SecurityError: it is a stage's.
        """
        role = self.role
        if role is not None and not role.is_driver:
            raise SecurityError(
                f"the certificate is for {role}, which cannot drive: `rpcmp certs issue DIR "
                "--driver` makes one that can"
            )


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


POLL_SECONDS = 2.0
"""Interval of checks of the files: how soon a revocation reaches open connections."""

EXPIRES_DAYS = 7
"""Certificates that expire within so many days are warned of."""

WARN_EACH_SECONDS = 24 * 3600.0

log = logging.getLogger(__name__)


async def watch(security: Security, warn: Callable[[str], None]) -> None:
    """End connections of revoked peers, and warn once a day before the certificate expires.

    Returns at once if there are no certificates, otherwise runs until it is cancelled.

    Args:
        security: of the process.
        warn: called with the text of a warning.
    """
    credentials = security.credentials
    if credentials is None:
        return
    checked = credentials.revocations
    warned = -WARN_EACH_SECONDS
    while True:
        credentials.refresh()
        if credentials.revocations is not checked:
            checked = credentials.revocations
            for role in security.end_revoked():
                warn(f"a connection with {role} is ended: its certificate is revoked")
        if time.monotonic() - warned >= WARN_EACH_SECONDS:
            warned = time.monotonic()
            if text := expiry_warning(security, datetime.now(UTC)):
                warn(text)
        await asyncio.sleep(POLL_SECONDS)


def expiry_warning(security: Security, now: datetime) -> str:
    """Return a warning if a certificate expires soon, else an empty string."""
    from rpcmp.net.certificates import Certificate  # cryptography is needed with certificates only

    assert security.credentials is not None
    try:
        found = Certificate.load(security.credentials.folder)
    except SecurityError:  # being written; the last one that could be read holds
        return ""
    days = (found.not_after - now).total_seconds() / 86400
    if days >= EXPIRES_DAYS:
        return ""
    when = "has expired"
    if days > 0:
        when = f"expires on {found.not_after:%Y-%m-%d}, in {days:.0f} days"
    return (
        f"{found.path} {when}: renew it where its authority is, by `rpcmp certs renew DIR` for "
        "one of rpcmp's, and copy it here; it is taken up without a restart"
    )
