"""Calls to all stage servers at once, and the rule for how many there must be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar, cast

from rpcmp.config import Config
from rpcmp.errors import ConfigError, UnreachableError

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
