"""Measuring our own way to a stage server: over the connections of a run, without gRPC."""

from __future__ import annotations

import asyncio
import ssl

from rpcmp.errors import RelayError, SecurityError, UnreachableError, one_line
from rpcmp.wire.credentials import RELAY
from rpcmp.wire.dialer import OPEN_SECONDS, Dialer
from rpcmp.wire.end import End, refusal
from rpcmp.wire.measure import Way, measure

IS_IT_RUNNING = "is `rpcmp serve` running there?"
"""What to do where nobody answers."""

PING_SECONDS = 10.0
"""How long it may take to go there and back some times."""

SEND_SECONDS = 60.0
"""How long it may take to send for a while each way."""

MEASURE_SECONDS = OPEN_SECONDS + SEND_SECONDS
"""How long a server may take that is asked to measure its way to another, and a little less."""


async def way_to(
    dialer: Dialer, name: str, address: str, stage_index: int | None, seconds: float
) -> Way:
    """The way to a stage's server.

    Args:
        dialer: how this process talks to servers.
        name: the stage's, for errors.
        address: HOST:PORT.
        stage_index: which stage its certificate has to be for; None: any.
        seconds: how long to send each way at least; 0: only there and back.

    Raises:
        UnreachableError: there is none, or it carries next to nothing.
        SecurityError: it leads to somebody else, or he does not let us in.
    """
    try:
        end = await dialer.open(address, RELAY, stage_index)
    except UnreachableError as error:
        raise UnreachableError(f"stage {name!r}: {error}; {IS_IT_RUNNING}") from error
    except SecurityError as error:
        raise SecurityError(f"stage {name!r}: {error}") from error
    where = f"stage {name!r} at {address}"
    try:
        return await _measure(end, where, seconds)
    except (EOFError, RelayError) as error:
        hint = "" if dialer.security.credentials else "; does its server want --certs?"
        raise UnreachableError(f"{where} does not let itself be measured: {error}{hint}") from error
    finally:
        end.close()


async def _measure(end: End, where: str, seconds: float) -> Way:
    limit = SEND_SECONDS if seconds else PING_SECONDS
    try:
        async with asyncio.timeout(limit):
            return await measure(end, seconds)
    except TimeoutError as error:
        raise UnreachableError(
            f"{where}: the way there carries next to nothing, {limit:.0f} s did not do to measure "
            "it; look for a firewall, or an MTU that is too large"
        ) from error
    except ssl.SSLError as error:  # of TLS 1.3 the first thing read says whether we are let in
        raise SecurityError(f"{where} refuses us: {refusal(error)}") from error
    except OSError as error:
        raise UnreachableError(f"lost {where} while measuring: {one_line(error)}") from error
