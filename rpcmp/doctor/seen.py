"""What was seen of the processes of a job and of the ways between them, before it is judged."""

from __future__ import annotations

from dataclasses import dataclass

from rpcmp.doctor.links import Link
from rpcmp.errors import RpcmpError
from rpcmp.examination.facts import HostFacts
from rpcmp.sections import StageConfig
from rpcmp.wire.measure import Way


@dataclass(frozen=True)
class Seen:
    """One stage, a spare, or the driver.

    Attributes:
        name: the stage's, "spare HOST:PORT", or the driver's.
        settings: of the stage; defaults for the others.
        address: HOST:PORT of its server; empty: the driver has none.
        facts: None where nobody could say.
        way: to it, from the driver; None for the driver itself, and where there is none.
        error: why something is missing.
    """

    name: str
    settings: StageConfig
    address: str = ""
    facts: HostFacts | None = None
    way: Way | None = None
    error: RpcmpError | None = None


@dataclass(frozen=True)
class SeenLink:
    """A link that the job uses.

    Attributes:
        link: which.
        way: as measured from its first end; None: both ends are in one network, so that nothing
            has to be carried, or there is none.
        error: why one end cannot reach the other.
    """

    link: Link
    way: Way | None = None
    error: RpcmpError | None = None
