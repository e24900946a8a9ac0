"""Calls to all stage servers at once, and the rule for how many there must be.

How a job talks to its stage servers, as its config says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar, cast

from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, UnreachableError
from rpcmp.net.dialer import Dialer
from rpcmp.net.security import INSECURE, WARN_SECONDS, Security, watch
from rpcmp.observability.events.definitions import WarningEvent
from rpcmp.observability.events.event import Event

Result = TypeVar("Result")


def require_one_each(config: Config, addresses: Sequence[str]) -> None:
    """Check the addresses of running servers, where there are any, and of spares.

    Raises:
        ConfigError: not one address a worker, one of them twice, or spares for servers that a run
            starts by itself.
    """
    if addresses and len(addresses) != len(config.workers):
        what = "workers (replicas of stages)" if config.is_replicated else "stages"
        raise ConfigError(
            f"{len(config.workers)} {what} need as many addresses, not {len(addresses)}: "
            f"{', '.join(addresses)}"
        )
    spares = config.recovery.spares
    if spares and not addresses:
        raise ConfigError(
            "recovery.spares stand in for hosts, and the stages have no addresses: servers "
            "that a run starts by itself it starts again as well; give addresses, or no spares"
        )
    everybody = [*addresses, *spares]
    if twice := sorted({address for address in everybody if everybody.count(address) > 1}):
        raise ConfigError(f"{', '.join(twice)} is given twice: a server serves one stage at a time")


async def all_of(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run all together; let all end, then raise the first error, or all unreachable ones."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if len(errors) > 1 and all(isinstance(error, UnreachableError) for error in errors):
        raise UnreachableError("; ".join(map(str, errors)))
    for error in errors:
        raise error
    return cast(list[Result], results)


def dialer_of(config: Config, addresses: Sequence[str], drives: bool = True) -> Dialer:
    """What opens connections to servers at `addresses`.

    Args:
        config: the job.
        addresses: of servers that run; none: they are started on this machine, and are ours.
        drives: whether more is wanted than to ask who they are.

    Raises:
        ConfigError: an address is not on loopback, and there are no certificates.
        SecurityError: the certificate cannot be used, or is not a driver's.
    """
    if not addresses:
        return Dialer(Security())
    security = Security(config.certs_folder, config.security.insecure)
    security.require_allowed(addresses)
    if drives:
        security.require_may_drive()
    return Dialer(security)


@contextlib.asynccontextmanager
async def warnings(
    config: Config, security: Security, report: Callable[[Event], None]
) -> AsyncIterator[None]:
    """Warn each minute that the job is insecure, if it is; otherwise watch its certificates."""

    def say(text: str) -> None:
        report(WarningEvent(text=text))

    async def warn() -> None:
        while config.security.insecure:
            say(INSECURE)
            await asyncio.sleep(WARN_SECONDS)
        await watch(security, say)

    warning = asyncio.create_task(warn())
    try:
        yield
    finally:
        warning.cancel()
