"""The findings of `rpcmp doctor`, made from reports without any process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schema import Config
from rpcmp.errors import BusyError, RpcmpError, SecurityError, UnreachableError, VersionError
from rpcmp.server.host_facts import (
    CertificateInfo,
    Device,
    Folder,
    HostFacts,
)
from rpcmp.server.link_speed import LinkSpeed
from rpcmp.tools.diagnosis import CheckedLink, Finding, Status, diagnose, exit_code
from rpcmp.tools.job_hosts import HostReport
from rpcmp.tools.job_links import Link
from tests.support.findings import examined

NOW = 1_800_000_000.0
DAY = 86400.0

NEAR = LinkSpeed(0.001, 0.0)

FACTS = HostFacts(
    host="host-a",
    machine="a",
    versions={"rpcmp": "0.1.0", "torch": "2.13.0+cpu", "protobuf": "7.36.2"},
    processors=4,
    certificate=CertificateInfo(role="stage 0", hosts=["host-a"], not_after=NOW + 100 * DAY),
    listens=["10.0.0.1:50051"],
    network="a:1",
    exposed="",
    folder=None,
    devices={"cpu": Device(name="x86_64 AVX2", available_bytes=2**33)},
    code={"my_model": "a" * 64},
    problems={},
)


def seen(
    facts: HostFacts | None = FACTS,
    way: LinkSpeed | None = NEAR,
    error: RpcmpError | None = None,
    **settings: Any,
) -> HostReport:
    return HostReport("stage0", StageConfig(**settings), "host-a:50051", facts, way, error)


def driver() -> HostReport:
    facts = FACTS.model_copy(update={"listens": [], "folder": Folder(has_marker=True)})
    return HostReport("driver", StageConfig(), facts=facts)


def findings(stage: HostReport, check: str, job: Config | None = None) -> list[Finding]:
    """Return the findings about one stage, beside a driver without problems."""
    found = diagnose(job or examined(), driver(), [stage], [], [], NOW)
    return [one for one in found if one.where == "stage0" and one.check == check]


def judged(stage: HostReport, check: str, job: Config | None = None) -> tuple[Status, str]:
    (found,) = findings(stage, check, job)
    return found.status, found.text


def having(**facts: Any) -> HostReport:
    return seen(FACTS.model_copy(update=facts))


def test_a_report_without_problems_gives_only_ok() -> None:
    found = diagnose(examined(), driver(), [seen()], [], [], NOW)
    assert {one.status for one in found} == {Status.OK}
    assert exit_code(found) == 0
    checks = {one.check for one in found if one.where == "stage0"}
    assert checks == {
        "reach",
        "clock",
        "certificate",
        "software",
        "code",
        "device",
        "listeners",
    }


@pytest.mark.parametrize(
    ("days", "status", "message"),
    [
        (100.0, Status.OK, "(100 days)"),
        (8.0, Status.OK, "(8 days)"),
        (6.0, Status.WARNING, "rpcmp certs renew DIR"),
        (-1.0, Status.FAILED, "it has expired"),
    ],
)
def test_an_expiring_certificate_is_a_warning_and_an_expired_one_a_failure(
    days: float, status: Status, message: str
) -> None:
    paper = CertificateInfo(role="stage 0", hosts=["host-a"], not_after=NOW + days * DAY)
    found, text = judged(having(certificate=paper), "certificate")
    assert found is status
    assert message in text


def test_a_missing_certificate_is_ok_unless_traffic_leaves_the_machine_in_the_clear() -> None:
    bare = having(certificate=None)
    assert judged(bare, "certificate")[0] is Status.OK
    insecure = examined(security={"insecure": True})
    assert judged(bare, "certificate", insecure)[0] is Status.WARNING


@pytest.mark.parametrize(
    ("ahead", "latency", "status"),
    [
        (0.5, 0.001, Status.OK),
        (-9.0, 0.001, Status.WARNING),
        (9.0, 8.0, Status.OK),  # the latency allows for this difference
        (400.0, 0.001, Status.WARNING),
        (90_000.0, 0.001, Status.FAILED),  # fresh certificates would not be valid yet
    ],
)
def test_a_skewed_clock_is_found_unless_latency_explains_it(
    ahead: float, latency: float, status: Status
) -> None:
    assert judged(seen(way=LinkSpeed(latency, ahead)), "clock")[0] is status


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("torch", "2.13.0+cu128", Status.OK),  # another build of the same release
        ("torch", "2.12.0", Status.FAILED),
        ("protobuf", "7.35.0", Status.WARNING),
    ],
)
def test_different_versions_are_found(package: str, version: str, status: Status) -> None:
    stage = having(versions={**FACTS.versions, package: version})
    found, text = judged(stage, "software")
    assert found is status
    assert (version in text) == (status is not Status.OK)


def test_code_that_differs_from_the_drivers_is_found() -> None:
    found = findings(having(code={"my_model": "b" * 64}), "code")
    assert [one.status for one in found] == [Status.OK, Status.FAILED]
    assert "'my_model' is other code than that of driver" in found[1].text


@pytest.mark.parametrize(
    ("problem", "hint"),
    [
        ("No module named 'a'", ": install it there, or let it lie beside the config, with "),
        ("FileNotFoundError: 'a'", "\nof what lies beside the config, Python files alone are sent"),
    ],
)
def test_a_callable_that_does_not_import_is_found(problem: str, hint: str) -> None:
    status, text = judged(having(problems={"loss": problem}), "code")
    assert status is Status.FAILED
    assert text.startswith(f"{problem}{hint}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threads": 5}, "5 of 4 processors"),
        ({"memory": "9 GiB"}, "less than memory = 9.0 GiB"),
    ],
)
def test_too_few_processors_or_too_little_memory_is_a_warning(
    settings: dict[str, Any], message: str
) -> None:
    found, text = judged(seen(**settings), "device")
    assert found is Status.WARNING
    assert message in text


def test_a_device_that_cannot_be_used_is_a_failure() -> None:
    stage = replace(
        having(devices={"cuda:1": Device(problem="device = 'cuda:1': no CUDA")}),
        settings=StageConfig(device="cuda:1"),
    )
    expected = (Status.FAILED, "device = 'cuda:1': no CUDA")
    assert judged(stage, "device") == expected


def test_devices_that_hosts_choose_are_named_and_those_that_workers_share() -> None:
    auto = Device(name="H100", alike=["cuda:0", "cuda:1"])
    reports = [
        replace(having(machine=machine, devices={device: auto}), name=name)
        for name, machine, device in [
            ("stage0", "a", "auto"),
            ("stage1", "a", "cuda:0"),
            ("stage2", "b", "auto"),
            ("stage3", "a", "auto"),
        ]
    ]
    found = diagnose(examined(), driver(), reports, [], [], NOW)
    texts = [one.text.partition(" (")[0] for one in found if one.check == "device"]
    assert texts[1:-1] == ["auto: cuda:1", "cuda:0", "auto: cuda:0", "auto: cuda:1"]
    assert texts[-1].startswith("stage0, stage3 share cuda:1 of host-a")
    assert found[-1].status is Status.WARNING


def test_unlike_processors_are_a_warning() -> None:
    other = replace(having(devices={"cpu": Device(name="aarch64 DEFAULT")}), name="stage1")
    found = diagnose(examined(), driver(), [seen(), other], [], [], NOW)
    (one,) = [each for each in found if each.where == "all stages"]
    assert one.status is Status.WARNING
    assert "aarch64 DEFAULT, x86_64 AVX2" in one.text


@pytest.mark.parametrize(
    ("found", "shared", "status"),
    [
        (Folder(free_bytes=2**30), False, Status.OK),
        (Folder(free_bytes=2**30), True, Status.FAILED),
        (Folder(free_bytes=2**30, has_marker=True), True, Status.OK),
        (Folder(problem="Read-only file system"), False, Status.FAILED),
    ],
)
def test_checkpoint_folders_are_judged(found: Folder, shared: bool, status: Status) -> None:
    job = examined(checkpoint={"dir": "/data", "shared": shared})
    assert judged(having(folder=found), "checkpoints", job)[0] is status


def test_a_folder_is_shown_where_its_server_keeps_it() -> None:
    job = examined(checkpoint={"dir": "/data"})
    found = Folder(path="/srv/checkpoints", free_bytes=2**30)
    assert judged(having(folder=found), "checkpoints", job)[1] == "/srv/checkpoints, 1.0 GiB free"


def test_a_missing_marker_is_ignored_if_the_driver_cannot_write() -> None:
    job = examined(checkpoint={"dir": "/data", "shared": True})
    home = replace(driver(), facts=FACTS.model_copy(update={"folder": Folder(problem="full")}))
    stage = having(folder=Folder(free_bytes=2**30))
    found = diagnose(job, home, [stage], [], [], NOW)
    failed = [(one.where, one.text) for one in found if one.status is Status.FAILED]
    assert failed == [
        ("driver", "nothing can be kept in /data: full"),
        ("driver", "10.0.0.1:50051: more than the one port that it should have"),
    ]


@pytest.mark.parametrize(
    ("there", "here", "status", "text"),
    [
        (True, False, Status.OK, "/models/a is there"),
        (False, True, Status.OK, "the driver sends the weights of the layers there"),
        (False, False, Status.FAILED, "there is no /models/a, nor on the driver's host"),
    ],
)
def test_weights_may_be_on_the_drivers_host_or_on_the_stages(
    there: bool, here: bool, status: Status, text: str
) -> None:
    home = replace(driver(), facts=FACTS.model_copy(update={"has_init": here}))
    found = diagnose(examined(init="/models/a"), home, [having(has_init=there)], [], [], NOW)
    own = {one.where: one for one in found if one.check == "init"}
    assert own["stage0"].status is status
    assert text in own["stage0"].text
    assert own["driver"].status is (Status.OK if here else Status.WARNING)
    assert not [one for one in diagnose(examined(), home, [], [], [], NOW) if one.check == "init"]


def test_more_than_one_listener_is_a_failure() -> None:
    stage = having(listens=["0.0.0.0:4711", "10.0.0.1:50051"])
    assert judged(stage, "listeners")[0] is Status.FAILED
    figures = having(listens=["0.0.0.0:9465", "10.0.0.1:50051"], metrics_port=9465)
    assert judged(figures, "listeners") == (
        Status.OK,
        "10.0.0.1:50051 alone, its figures at port 9465; the worker's are in a network of its own",
    )
    stage = having(listens=["0.0.0.0:9465", "0.0.0.0:4711", "10.0.0.1:50051"], metrics_port=9465)
    assert judged(stage, "listeners")[1].startswith("0.0.0.0:4711, 10.0.0.1:50051: more than")
    stage = having(exposed="no network namespace can be made")
    assert judged(stage, "listeners")[0] is Status.WARNING


@pytest.mark.parametrize(
    ("error", "check", "code"),
    [
        (UnreachableError("gone"), "reach", 75),
        (BusyError("busy"), "free", 75),
        (SecurityError("who?"), "certificate", 1),
        (VersionError("old"), "software", 1),
        (RpcmpError("else"), "job", 1),
    ],
)
def test_an_error_becomes_a_finding_and_an_exit_code(
    error: RpcmpError, check: str, code: int
) -> None:
    found = diagnose(examined(), driver(), [seen(None, None, error)], [], [], NOW)
    assert exit_code(found) == code
    assert [one.check for one in found if one.where == "stage0"] == [check]


def test_a_server_that_is_away_does_not_hide_another_failure() -> None:
    stages = [seen(None, None, UnreachableError("gone")), replace(having(listens=["a:1", "b:1"]))]
    assert exit_code(diagnose(examined(), driver(), stages, [], [], NOW)) == 1


def test_a_link_finding_names_its_traffic() -> None:
    link = Link("stage0", "stage1", ("activations",))
    ways = [
        CheckedLink(link, LinkSpeed(0.0015, 0.0, 125e6, 60e6)),
        CheckedLink(link),
        CheckedLink(link, error=UnreachableError("cut")),
    ]
    found = diagnose(examined(), driver(), [seen()], [], ways, NOW)[-3:]
    assert [one.text for one in found] == [
        "activations: 1.5 ms, 125 MB/s there, 60 MB/s back",
        "activations: within one network",
        "cut",
    ]
    assert exit_code(found) == 75
