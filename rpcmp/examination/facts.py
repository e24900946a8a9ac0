"""What is asked of a host before a run, and what it answers; travels as JSON."""

from __future__ import annotations

from pydantic import Field

from rpcmp.kinds import Strict


class Order(Strict):
    """What one stage of a job, or its driver, will need.

    Attributes:
        callables: "module:callable" of what will be built there, by config key.
        devices: torch devices.
        metrics: "module:callable" of those that the driver may have to compute, by config key.
        folder: where checkpoints go, absolute; empty: nowhere.
        marker: name of a file that is in that folder if it is the driver's; empty: it need not be.
    """

    callables: dict[str, str]
    devices: list[str]
    metrics: dict[str, str] = Field(default_factory=dict)
    folder: str = ""
    marker: str = ""


class Device(Strict):
    """A device.

    Attributes:
        name: what a person would call it.
        available_bytes: of memory; None where nobody knows.
        problem: why it cannot be used; empty: it can.
    """

    name: str = ""
    available_bytes: int | None = None
    problem: str = ""


class Folder(Strict):
    """A folder for checkpoints.

    Attributes:
        free_bytes: on its disk.
        has_marker: whether the driver's marker is in it.
        problem: why nothing can be kept there; empty: it can.
    """

    free_bytes: int = 0
    has_marker: bool = False
    problem: str = ""


class Paper(Strict):
    """A certificate.

    Attributes:
        role: what its holder may be; empty: nothing.
        hosts: names and addresses that it is for.
        not_after: until when it is valid, in seconds since 1970.
    """

    role: str
    hosts: list[str]
    not_after: float


class HostFacts(Strict):
    """One host.

    Attributes:
        host: its name.
        machine: equal for all servers on it.
        versions: of rpcmp and what it is made of, by package.
        processors: that this user may use.
        certificate: None where it has none.
        listens: HOST:PORT of every TCP socket at which the supervisor listens.
        metrics_port: where the supervisor was told to have its figures; 0: nowhere.
        network: equal for workers that reach each other by loopback.
        exposed: why other users of the host could reach a worker there; empty: they cannot.
        confinement: what confines the job's code there; empty: it is not confined.
        unconfined: what it can do all the same, since the kernel lacks something.
        folder: None where there are to be no checkpoints.
        devices: those that were asked for, by what they were called.
        code: SHA-256 of what is installed or was sent along, by top-level module.
        problems: of callables, by config key: why one does not import.
        driver_metrics: keys of those of the order's metrics that keep a state.
    """

    host: str
    machine: str
    versions: dict[str, str]
    processors: int
    certificate: Paper | None
    listens: list[str]
    metrics_port: int = 0
    network: str
    exposed: str
    confinement: str = ""
    unconfined: str = ""
    folder: Folder | None
    devices: dict[str, Device]
    code: dict[str, str]
    problems: dict[str, str]
    driver_metrics: list[str] = Field(default_factory=list)
