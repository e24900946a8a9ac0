"""Check the hosts of a job and the links between them before a run, and judge the results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from rpcmp.checkpoint.slots import mirrors_of
from rpcmp.config import addresses
from rpcmp.config.device_places import AUTO, Place, on_machine, place, shared
from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER
from rpcmp.config.types import format_size, parse_size
from rpcmp.errors import RpcmpError, SecurityError, UnavailableError, UnreachableError, VersionError
from rpcmp.job.server_calls import dialer_for, server_addresses
from rpcmp.job.server_pool import connected, forks_for
from rpcmp.net.authority import SKEW
from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import EXPIRES_DAYS, INSECURE
from rpcmp.server.client import StageClient
from rpcmp.server.connection import NEEDED_EQUAL, is_same_release
from rpcmp.server.host_facts import Device, Folder, HostFacts
from rpcmp.server.link_speed import LinkSpeed, measure_link
from rpcmp.tools.job_hosts import HostReport, HostSurvey
from rpcmp.tools.job_links import Link, job_links
from rpcmp.v1 import doctor_pb2

CLOCK_SECONDS = 5.0
"""Largest difference of clocks that leaves logs and traces readable."""


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """Result of one check of one process or link.

    Attributes:
        where: the worker, the driver, or "a - b" for the link between two.
        is_temporary: whether it may end without any action.
    """

    where: str
    check: str
    status: Status
    text: str
    is_temporary: bool = False


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if a run may start, 75 if servers are only away or busy, and else 1."""
    failed = [finding for finding in findings if finding.status is Status.FAILED]
    if not failed:
        return 0
    return 75 if all(finding.is_temporary for finding in failed) else 1


@dataclass(frozen=True)
class CheckedLink:
    """A link that the job uses.

    Attributes:
        speed: measured from the link's first end; None if both ends are in one network, so that
            no connection is needed, and if there is no connection.
        error: why one end cannot reach the other.
    """

    link: Link
    speed: LinkSpeed | None = None
    error: RpcmpError | None = None


def diagnose(
    config: Config,
    driver: HostReport,
    workers: Sequence[HostReport],
    spares: Sequence[HostReport],
    links: Sequence[CheckedLink],
    now: float,
) -> list[Finding]:
    """Judge the reports of all hosts and links; `now` is in seconds since 1970."""
    places = _places(workers)
    devices = {each.worker: each.device for each in places}
    return [
        *(
            finding
            for report in (driver, *workers, *spares)
            for finding in _host(config, report, driver.facts, now, devices.get(report.name, AUTO))
        ),
        *_compare_code([driver, *workers, *spares]),
        *_compare_devices(workers),
        *(Finding("all stages", "device", Status.WARNING, text) for text in shared(places)),
        *(_link(link) for link in links),
    ]


def _places(workers: Sequence[HostReport]) -> list[Place]:
    """Return the device that each worker will have, by what its host has."""
    seen = [(one.name, one.facts) for one in workers if one.facts and one.facts.devices]
    machines = [facts.machine for _, facts in seen]
    wanted = [next(iter(facts.devices)) for _, facts in seen]
    places = []
    for index, (name, facts) in enumerate(seen):
        device = wanted[index]
        alike = facts.devices[device].alike
        if device == AUTO and alike:
            here, own = on_machine(wanted, machines, index)
            device = alike[place(here, own, len(alike))]
        places.append(Place(name, facts.machine, facts.host, wanted[index], device))
    return places


def _host(
    config: Config, report: HostReport, reference: HostFacts | None, now: float, auto: str
) -> Iterator[Finding]:
    if report.speed is not None:
        yield from _reach(report, report.speed)
    if report.error is not None:
        yield _refusal(report.name, report.error)
    if (facts := report.facts) is None:
        return
    yield _certificate(config, report.name, facts, now)
    yield from _software(report.name, facts, reference)
    yield from _code(report.name, facts)
    yield from _devices(report, facts, auto)
    if facts.folder is not None:
        yield _folder(config, report.name, facts.folder, reference)
    if config.init is not None:
        yield _init(config.init_path, report.name, facts, reference)
    yield from _listeners(report, facts)
    yield from _confinement(report.name, facts)


def _reach(report: HostReport, speed: LinkSpeed) -> Iterator[Finding]:
    text = f"{report.address} answers in {1000 * speed.latency_s:.1f} ms"
    yield Finding(report.name, "reach", Status.OK, text)
    # A difference up to the latency need not be the clock's.
    ahead = speed.clock_ahead_s
    skew = max(0.0, abs(ahead) - speed.latency_s)
    which = "ahead of" if ahead > 0 else "behind"
    text = f"{abs(ahead):.3f} s {which} the driver's" if skew else "the driver's"
    status = Status.OK
    if skew > CLOCK_SECONDS:
        status = Status.FAILED if skew > SKEW.total_seconds() else Status.WARNING
        text += ": let NTP set the clocks, by which certificates are valid and traces put in order"
    yield Finding(report.name, "clock", status, text)


def _refusal(where: str, error: RpcmpError) -> Finding:
    checks = {
        UnreachableError: "reach",
        SecurityError: "certificate",
        VersionError: "software",
        UnavailableError: "free",
    }
    check = next((name for kind, name in checks.items() if isinstance(error, kind)), "job")
    is_temporary = isinstance(error, UnavailableError)
    return Finding(where, check, Status.FAILED, str(error), is_temporary)


def _certificate(config: Config, where: str, facts: HostFacts, now: float) -> Finding:
    certificate = facts.certificate
    if certificate is None:
        if config.security.insecure:
            return Finding(where, "certificate", Status.WARNING, INSECURE)
        return Finding(where, "certificate", Status.OK, "none: nothing leaves this machine")
    until = datetime.fromtimestamp(certificate.not_after, UTC)
    days = (certificate.not_after - now) / 86400
    hosts = f" at {', '.join(certificate.hosts)}" if certificate.hosts else ""
    text = (
        f"{certificate.role or 'no role'}{hosts}, until {until:%Y-%m-%d} ({max(days, 0):.0f} days)"
    )
    if days >= EXPIRES_DAYS:
        return Finding(where, "certificate", Status.OK, text)
    status, expired = (Status.FAILED, " it has expired;") if days < 0 else (Status.WARNING, "")
    text += f":{expired} `rpcmp certs renew DIR`, and copy it there: no restart is needed"
    return Finding(where, "certificate", status, text)


def _software(where: str, facts: HostFacts, reference: HostFacts | None) -> Iterator[Finding]:
    if reference is None or reference is facts:
        versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
        yield Finding(where, "software", Status.OK, versions)
        return
    is_same = True
    for package, ours in reference.versions.items():
        theirs = facts.versions.get(package, "missing")
        if not is_same_release(ours, theirs):
            is_same = False
            # A server refuses a job if one of NEEDED_EQUAL differs; the others may matter.
            status = Status.FAILED if package in NEEDED_EQUAL else Status.WARNING
            text = f"{package} is {theirs} there and {ours} here: install the same everywhere"
            yield Finding(where, "software", status, text)
    if is_same:
        yield Finding(where, "software", Status.OK, "the same versions as the driver's")


def _code(where: str, facts: HostFacts) -> Iterator[Finding]:
    for problem in facts.problems.values():
        hint = ""
        if "No module named" in problem:
            hint = ": install it there, or let it lie beside the config, with ship_code = true"
        elif "FileNotFoundError" in problem:
            hint = "\nof what lies beside the config, Python files alone are sent: put it there"
        yield Finding(where, "code", Status.FAILED, problem + hint)
    if not facts.problems:
        text = ", ".join(f"{module} {_short(digest)}" for module, digest in facts.code.items())
        yield Finding(where, "code", Status.OK, text)


def _devices(report: HostReport, facts: HostFacts, auto: str) -> Iterator[Finding]:
    for name, device in facts.devices.items():
        shown = f"{AUTO}: {auto}" if name == AUTO != auto else name
        status, text = _device(report.settings, shown, device, facts.processors)
        yield Finding(report.name, "device", status, text)


def _device(
    settings: StageConfig, name: str, device: Device, processors: int
) -> tuple[Status, str]:
    if device.problem:
        return Status.FAILED, device.problem
    free = device.available_bytes
    memory = "" if free is None else f", {format_size(free)} free"
    text = f"{name} ({device.name}), {settings.threads} of {processors} processors{memory}"
    wanted = parse_size(settings.memory) if settings.memory else 0
    if settings.threads > processors:
        return Status.WARNING, f"{text}: these threads will get in each other's way"
    if free is not None and wanted > free:
        return Status.WARNING, f"{text}: less than memory = {format_size(wanted)}"
    return Status.OK, text


def _folder(config: Config, where: str, folder: Folder, driver: HostFacts | None) -> Finding:
    path = folder.path or config.checkpoint_folder
    is_shared = config.checkpoint is not None and config.checkpoint.shared
    # If the driver cannot write there, a missing marker proves nothing.
    is_marked = driver is not None and driver.folder is not None and driver.folder.has_marker
    if folder.problem:
        text = f"nothing can be kept in {path}: {folder.problem}"
    elif is_shared and is_marked and not folder.has_marker:
        text = f"{path} is not the driver's folder: mount it there, or leave out `shared`"
    else:
        return Finding(
            where, "checkpoints", Status.OK, f"{path}, {format_size(folder.free_bytes)} free"
        )
    return Finding(where, "checkpoints", Status.FAILED, text)


def _init(path: str, where: str, facts: HostFacts, driver: HostFacts | None) -> Finding:
    if facts.has_init:
        return Finding(where, "init", Status.OK, f"{path} is there")
    if facts is driver:
        text = f"there is no {path}: it has to be on every other host"
        return Finding(where, "init", Status.WARNING, text)
    if driver is None or driver.has_init:
        text = f"there is no {path}: the driver sends the weights of the layers there"
        return Finding(where, "init", Status.OK, text)
    return Finding(where, "init", Status.FAILED, f"there is no {path}, nor on the driver's host")


def _listeners(report: HostReport, facts: HostFacts) -> Iterator[Finding]:
    allowed = 1 if report.address else 0
    own = [one for one in facts.listens if addresses.parse(one)[1] != facts.metrics_port]
    if len(own) > allowed:
        text = f"{', '.join(own)}: more than the one port that it should have"
        yield Finding(report.name, "listeners", Status.FAILED, text)
    elif facts.exposed:
        text = f"other users of its host can reach its worker: {facts.exposed}"
        yield Finding(report.name, "listeners", Status.WARNING, text)
    elif report.address:
        figures = f", its figures at port {facts.metrics_port}" if facts.metrics_port else ""
        text = f"{''.join(own)} alone{figures}; the worker's are in a network of its own"
        yield Finding(report.name, "listeners", Status.OK, text)


def _confinement(where: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.unconfined:
        text = f"{facts.confinement}: the job's code there can {facts.unconfined}: a newer kernel"
        yield Finding(where, "confinement", Status.WARNING, f"{text} confines it")
    elif facts.confinement:
        yield Finding(where, "confinement", Status.OK, facts.confinement)


def _compare_code(reports: Sequence[HostReport]) -> Iterator[Finding]:
    first: dict[str, tuple[str, str]] = {}
    for report in reports:
        for module, digest in (report.facts.code if report.facts else {}).items():
            where, reference = first.setdefault(module, (report.name, digest))
            if digest != reference:
                text = (
                    f"{module!r} is other code than that of {where} ({_short(digest)}, not "
                    f"{_short(reference)}): install the same everywhere"
                )
                yield Finding(report.name, "code", Status.FAILED, text)


def _compare_devices(workers: Sequence[HostReport]) -> Iterator[Finding]:
    every = [device for one in workers if one.facts for device in one.facts.devices.values()]
    names = {device.name for device in every if device.name}
    if len(names) > 1:
        text = (
            f"unlike devices round differently, so `verify` will fail: {', '.join(sorted(names))}"
        )
        yield Finding("all stages", "device", Status.WARNING, text)


def _link(checked: CheckedLink) -> Finding:
    where = f"{checked.link.one} - {checked.link.other}"
    carries = ", ".join(checked.link.carries)
    if checked.error is not None:
        is_temporary = isinstance(checked.error, UnavailableError)
        return Finding(where, "link", Status.FAILED, str(checked.error), is_temporary)
    if (speed := checked.speed) is None:
        return Finding(where, "link", Status.OK, f"{carries}: within one network")
    text = f"{carries}: {1000 * speed.latency_s:.1f} ms"
    if speed.there:
        text += f", {speed.there / 1e6:,.0f} MB/s there, {speed.back / 1e6:,.0f} MB/s back"
    return Finding(where, "link", Status.OK, text)


def _short(digest: str) -> str:
    return digest[:8]


PROBE_SECONDS = 0.25
"""Least time for which a link is measured in each direction; a check takes a few times that."""


async def check_up(config: Config, connect: Sequence[str] | None = None) -> list[Finding]:
    """Check all hosts of a job and the links between them.

    Args:
        connect: addresses of running stage servers, one per worker; None uses the config's or, if
            it has none, starts servers on this machine.
    """
    addresses = server_addresses(config, connect)
    dialer = dialer_for(config, [*addresses, *config.recovery.spares])
    async with (
        forks_for(config, connect) as forks,
        connected(config, dialer, addresses, len(config.workers), forks) as clients,
    ):
        survey = HostSurvey(config, clients, addresses, dialer, forks)
        driver, workers, spares = await survey.collect()
        checked = await LinkCheck(config, clients, dialer).run([driver, *workers])
        return diagnose(config, driver, workers, spares, checked, time.time())


class LinkCheck:
    """Checks the links that a job uses."""

    def __init__(self, config: Config, clients: Sequence[StageClient], dialer: Dialer) -> None:
        self._config, self._dialer = config, dialer
        self._clients = {client.name: client for client in clients}
        self._stages = {worker.label: worker.stage_index for worker in config.workers}

    async def run(self, reports: Sequence[HostReport]) -> list[CheckedLink]:
        """Check the links between hosts that have answered, one after the other."""
        facts = {report.name: report.facts for report in reports if report.facts}
        machines = [facts[label].machine if label in facts else label for label in self._stages]
        return [
            await self._check(link, facts)
            for link in job_links(self._config, mirrors_of(self._config, machines))
            if link.one in facts and link.other in facts
        ]

    async def _check(self, link: Link, facts: Mapping[str, HostFacts]) -> CheckedLink:
        if facts[link.one].network == facts[link.other].network:
            return CheckedLink(link)
        seconds = PROBE_SECONDS if link.has_tensors else 0
        other = self._clients[link.other]
        try:
            if link.one == DRIVER:
                stage = self._stages[other.name]
                speed = await measure_link(self._dialer, other.name, other.address, stage, seconds)
                return CheckedLink(link, speed)
            one = self._clients[link.one]
            speed = await one.probe(self._probe(other, seconds))
            await other.probe(self._probe(one, seconds=0))
        except RpcmpError as error:
            return CheckedLink(link, error=error)
        return CheckedLink(link, speed)

    def _probe(self, other: StageClient, seconds: float) -> doctor_pb2.ProbeRequest:
        return doctor_pb2.ProbeRequest(
            stage_name=other.name,
            address=other.address,
            stage_index=self._stages[other.name],
            seconds=seconds,
        )
