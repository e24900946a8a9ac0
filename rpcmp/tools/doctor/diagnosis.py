"""What is made of what was seen: the rules. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rpcmp.config import addresses
from rpcmp.config.schema import Config
from rpcmp.config.sections import StageConfig
from rpcmp.config.types import format_size, parse_size
from rpcmp.errors import RpcmpError, SecurityError, UnavailableError, UnreachableError, VersionError
from rpcmp.net.authority import SKEW
from rpcmp.net.security import EXPIRES_DAYS, INSECURE
from rpcmp.server.connection import NEEDED_EQUAL, is_same_release
from rpcmp.server.host_facts import Device, Folder, HostFacts
from rpcmp.tools.doctor.findings import Finding, HostReport, SeenLink, Status

CLOCK_SECONDS = 5.0
"""What clocks may differ by before logs and traces become hard to read."""


def diagnose(
    config: Config,
    driver: HostReport,
    stages: Sequence[HostReport],
    spares: Sequence[HostReport],
    ways: Sequence[SeenLink],
    now: float,
) -> list[Finding]:
    """Everything that was looked at.

    Args:
        config: the job.
        driver: this host.
        stages: in the config's order.
        spares: servers that may take any stage.
        ways: between them.
        now: seconds since 1970.
    """
    return [
        *(
            found
            for seen in (driver, *stages, *spares)
            for found in _of_one(config, seen, driver.facts, now)
        ),
        *_code_compared([driver, *stages, *spares]),
        *_processors_compared(stages),
        *(_link(way) for way in ways),
    ]


def _of_one(
    config: Config, seen: HostReport, reference: HostFacts | None, now: float
) -> Iterator[Finding]:
    if seen.way is not None:
        yield from _reach(seen)
    if seen.error is not None:
        yield _refusal(seen.name, seen.error)
    if seen.facts is None:
        return
    yield _certificate(config, seen, seen.facts, now)
    yield from _software(seen.name, seen.facts, reference)
    yield from _code(seen.name, seen.facts)
    yield from _devices(seen, seen.facts)
    if seen.facts.folder is not None:
        yield _folder(config, seen.name, seen.facts.folder, reference)
    yield from _listeners(seen, seen.facts)
    yield from _confinement(seen.name, seen.facts)


def _reach(seen: HostReport) -> Iterator[Finding]:
    assert seen.way is not None
    text = f"{seen.address} answers in {1000 * seen.way.latency_s:.1f} ms"
    yield Finding(seen.name, "reach", Status.OK, text)
    # What latency can explain is not the clock's.
    ahead = seen.way.clock_ahead_s
    skew = max(0.0, abs(ahead) - seen.way.latency_s)
    which = "ahead of" if ahead > 0 else "behind"
    text = f"{abs(ahead):.3f} s {which} the driver's" if skew else "the driver's"
    status = Status.OK
    if skew > CLOCK_SECONDS:
        status = Status.FAILED if skew > SKEW.total_seconds() else Status.WARNING
        text += ": let NTP set the clocks, by which certificates are valid and traces put in order"
    yield Finding(seen.name, "clock", status, text)


def _refusal(where: str, error: RpcmpError) -> Finding:
    check = "job"
    if isinstance(error, UnreachableError):
        check = "reach"
    elif isinstance(error, SecurityError):
        check = "certificate"
    elif isinstance(error, VersionError):
        check = "software"
    elif isinstance(error, UnavailableError):
        check = "free"
    is_temporary = isinstance(error, UnavailableError)
    return Finding(where, check, Status.FAILED, str(error), is_temporary)


def _certificate(config: Config, seen: HostReport, facts: HostFacts, now: float) -> Finding:
    paper = facts.certificate
    if paper is None:
        if config.security.insecure:
            return Finding(seen.name, "certificate", Status.WARNING, INSECURE)
        return Finding(seen.name, "certificate", Status.OK, "none: nothing leaves this machine")
    until = datetime.fromtimestamp(paper.not_after, UTC)
    days = (paper.not_after - now) / 86400
    hosts = f" at {', '.join(paper.hosts)}" if paper.hosts else ""
    text = f"{paper.role or 'no role'}{hosts}, until {until:%Y-%m-%d} ({max(days, 0):.0f} days)"
    if days < 0:
        text += ": it has expired; `rpcmp certs renew DIR`, and copy it there: no restart is needed"
        return Finding(seen.name, "certificate", Status.FAILED, text)
    if days < EXPIRES_DAYS:
        text += ": `rpcmp certs renew DIR`, and copy it there: no restart is needed"
        return Finding(seen.name, "certificate", Status.WARNING, text)
    return Finding(seen.name, "certificate", Status.OK, text)


def _software(where: str, facts: HostFacts, reference: HostFacts | None) -> Iterator[Finding]:
    if reference is None or reference is facts:
        versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
        yield Finding(where, "software", Status.OK, versions)
        return
    found = False
    for package, ours in reference.versions.items():
        theirs = facts.versions.get(package, "missing")
        if not is_same_release(ours, theirs):
            found = True
            # Without these being the same a server refuses the job; of others it is well to know.
            status = Status.FAILED if package in NEEDED_EQUAL else Status.WARNING
            text = f"{package} is {theirs} there and {ours} here: install the same everywhere"
            yield Finding(where, "software", status, text)
    if not found:
        yield Finding(where, "software", Status.OK, "the same versions as the driver's")


def _code(where: str, facts: HostFacts) -> Iterator[Finding]:
    for problem in facts.problems.values():
        hint = ""
        if "No module named" in problem:
            hint = ": install it there, or let it lie beside the config, with ship_code = true"
        yield Finding(where, "code", Status.FAILED, problem + hint)
    if not facts.problems:
        text = ", ".join(f"{module} {_short(digest)}" for module, digest in facts.code.items())
        yield Finding(where, "code", Status.OK, text)


def _devices(seen: HostReport, facts: HostFacts) -> Iterator[Finding]:
    for name, device in facts.devices.items():
        status, text = _device(seen.settings, name, device, facts.processors)
        yield Finding(seen.name, "device", status, text)


def _device(
    settings: StageConfig, name: str, device: Device, processors: int
) -> tuple[Status, str]:
    if device.problem:
        return Status.FAILED, f"{name} cannot be used: {device.problem}"
    free = device.available_bytes
    memory = "" if free is None else f", {format_size(free)} free"
    text = f"{name} ({device.name}), {settings.threads} of {processors} processors{memory}"
    wanted = parse_size(settings.memory) if settings.memory else 0
    if settings.threads > processors:
        return Status.WARNING, f"{text}: these threads will get in each other's way"
    if free is not None and wanted > free:
        return Status.WARNING, f"{text}: less than memory = {format_size(wanted)}"
    return Status.OK, text


def _folder(config: Config, where: str, found: Folder, driver: HostFacts | None) -> Finding:
    path = config.checkpoint_folder
    is_shared = config.checkpoint is not None and config.checkpoint.shared
    # Where the driver cannot write, nobody can see what it has written.
    is_marked = driver is not None and driver.folder is not None and driver.folder.has_marker
    if found.problem:
        text = f"nothing can be kept in {path}: {found.problem}"
    elif is_shared and is_marked and not found.has_marker:
        text = f"{path} is not the driver's folder: mount it there, or leave out `shared`"
    else:
        return Finding(
            where, "checkpoints", Status.OK, f"{path}, {format_size(found.free_bytes)} free"
        )
    return Finding(where, "checkpoints", Status.FAILED, text)


def _listeners(seen: HostReport, facts: HostFacts) -> Iterator[Finding]:
    allowed = 1 if seen.address else 0
    own = [one for one in facts.listens if addresses.parse(one)[1] != facts.metrics_port]
    if len(own) > allowed:
        text = f"{', '.join(own)}: more than the one port that it should have"
        yield Finding(seen.name, "listeners", Status.FAILED, text)
    elif facts.exposed:
        text = f"other users of its host can reach its worker: {facts.exposed}"
        yield Finding(seen.name, "listeners", Status.WARNING, text)
    elif seen.address:
        figures = f", its figures at port {facts.metrics_port}" if facts.metrics_port else ""
        text = f"{''.join(own)} alone{figures}; the worker's are in a network of its own"
        yield Finding(seen.name, "listeners", Status.OK, text)


def _confinement(where: str, facts: HostFacts) -> Iterator[Finding]:
    if facts.unconfined:
        text = f"{facts.confinement}: the job's code there can {facts.unconfined}: a newer kernel"
        yield Finding(where, "confinement", Status.WARNING, f"{text} confines it")
    elif facts.confinement:
        yield Finding(where, "confinement", Status.OK, facts.confinement)


def _code_compared(everybody: Sequence[HostReport]) -> Iterator[Finding]:
    first: dict[str, tuple[str, str]] = {}
    for seen in everybody:
        for module, digest in (seen.facts.code if seen.facts else {}).items():
            where, reference = first.setdefault(module, (seen.name, digest))
            if digest != reference:
                text = (
                    f"{module!r} is other code than that of {where} ({_short(digest)}, not "
                    f"{_short(reference)}): install the same everywhere"
                )
                yield Finding(seen.name, "code", Status.FAILED, text)


def _processors_compared(stages: Sequence[HostReport]) -> Iterator[Finding]:
    found = [device for seen in stages if seen.facts for device in seen.facts.devices.values()]
    names = {device.name for device in found if device.name}
    if len(names) > 1:
        text = (
            f"unlike devices round differently, so `verify` will fail: {', '.join(sorted(names))}"
        )
        yield Finding("all stages", "device", Status.WARNING, text)


def _link(seen: SeenLink) -> Finding:
    where = f"{seen.link.one} - {seen.link.other}"
    carries = ", ".join(seen.link.carries)
    if seen.error is not None:
        is_temporary = isinstance(seen.error, UnavailableError)
        return Finding(where, "link", Status.FAILED, str(seen.error), is_temporary)
    if (way := seen.way) is None:
        return Finding(where, "link", Status.OK, f"{carries}: within one network")
    text = f"{carries}: {1000 * way.latency_s:.1f} ms"
    if way.there:
        text += f", {way.there / 1e6:,.0f} MB/s there, {way.back / 1e6:,.0f} MB/s back"
    return Finding(where, "link", Status.OK, text)


def _short(digest: str) -> str:
    return digest[:8]
