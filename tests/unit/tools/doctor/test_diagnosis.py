"""What a doctor asks, and what is made of the answers; no processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rpcmp.config import topology
from rpcmp.config.schema import Config
from rpcmp.config.sections import StageConfig
from rpcmp.config.user_code import sha256_of
from rpcmp.errors import BusyError, RpcmpError, SecurityError, UnreachableError, VersionError
from rpcmp.net.link_test import LinkSpeed
from rpcmp.server.host_facts import (
    CertificateInfo,
    Device,
    Folder,
    HostFacts,
    marked,
    try_folder,
)
from rpcmp.tools.doctor import checkup
from rpcmp.tools.doctor.diagnosis import diagnose
from rpcmp.tools.doctor.findings import (
    Finding,
    HostReport,
    Link,
    SeenLink,
    Status,
    exit_code,
    links,
)
from tests.support.graphs import workers

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


def config(**more: Any) -> Config:
    return Config.model_validate(
        {
            "loss": "torch.nn:MSELoss",
            "model": {"layers": "my_model:layers", "num_stages": 2},
            "data": {"train": "my_data:train"},
            "metrics": {"accuracy": "my_metrics:accuracy"},
            **more,
        }
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
    """What is said of one stage beside a driver that is in order."""
    found = diagnose(job or config(), driver(), [stage], [], [], NOW)
    return [one for one in found if one.where == "stage0" and one.check == check]


def judged(stage: HostReport, check: str, job: Config | None = None) -> tuple[Status, str]:
    (found,) = findings(stage, check, job)
    return found.status, found.text


def having(**facts: Any) -> HostReport:
    return seen(FACTS.model_copy(update=facts))


def test_all_is_well() -> None:
    found = diagnose(config(), driver(), [seen()], [], [], NOW)
    assert {one.status for one in found} == {Status.OK}
    assert exit_code(found) == 0
    checks = {one.check for one in found if one.where == "stage0"}
    assert checks == {"reach", "clock", "certificate", "software", "code", "device", "listeners"}


@pytest.mark.parametrize(
    ("days", "status", "said"),
    [
        (100.0, Status.OK, "(100 days)"),
        (8.0, Status.OK, "(8 days)"),
        (6.0, Status.WARNING, "rpcmp certs renew DIR"),
        (-1.0, Status.FAILED, "it has expired"),
    ],
)
def test_certificates_run_out(days: float, status: Status, said: str) -> None:
    paper = CertificateInfo(role="stage 0", hosts=["host-a"], not_after=NOW + days * DAY)
    found, text = judged(having(certificate=paper), "certificate")
    assert found is status
    assert said in text


def test_no_certificate_is_in_order_only_where_nothing_leaves_the_machine() -> None:
    bare = having(certificate=None)
    assert judged(bare, "certificate")[0] is Status.OK
    insecure = config(security={"insecure": True})
    assert judged(bare, "certificate", insecure)[0] is Status.WARNING


@pytest.mark.parametrize(
    ("ahead", "latency", "status"),
    [
        (0.5, 0.001, Status.OK),
        (-9.0, 0.001, Status.WARNING),
        (9.0, 8.0, Status.OK),  # as far as anybody can tell
        (400.0, 0.001, Status.FAILED),
    ],
)
def test_clocks(ahead: float, latency: float, status: Status) -> None:
    assert judged(seen(way=LinkSpeed(latency, ahead)), "clock")[0] is status


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("torch", "2.13.0+cu128", Status.OK),  # another build of the same release
        ("torch", "2.12.0", Status.FAILED),
        ("protobuf", "7.35.0", Status.WARNING),
    ],
)
def test_versions(package: str, version: str, status: Status) -> None:
    stage = having(versions={**FACTS.versions, package: version})
    found, text = judged(stage, "software")
    assert found is status
    assert (version in text) == (status is not Status.OK)


def test_other_code_than_the_drivers() -> None:
    found = findings(having(code={"my_model": "b" * 64}), "code")
    assert [one.status for one in found] == [Status.OK, Status.FAILED]
    assert "'my_model' is other code than that of driver" in found[1].text


def test_code_that_is_not_there() -> None:
    problem = "loss = 'my_loss:Loss' does not import: No module named 'my_loss'"
    assert judged(having(problems={"loss": problem}), "code") == (
        Status.FAILED,
        f"{problem}: install it there, or let it lie beside the config, with ship_code = true",
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"threads": 5}, "5 of 4 processors"),
        ({"memory": "9 GiB"}, "less than memory = 9.0 GiB"),
    ],
)
def test_a_host_that_is_too_small(settings: dict[str, Any], said: str) -> None:
    found, text = judged(seen(**settings), "device")
    assert found is Status.WARNING
    assert said in text


def test_a_device_that_is_not_there() -> None:
    stage = replace(
        having(devices={"cuda:1": Device(problem="no CUDA")}), settings=StageConfig(device="cuda:1")
    )
    expected = (Status.FAILED, "cuda:1 cannot be used: no CUDA")
    assert judged(stage, "device") == expected


def test_unlike_processors_do_not_give_equal_bits() -> None:
    other = replace(having(devices={"cpu": Device(name="aarch64 DEFAULT")}), name="stage1")
    found = diagnose(config(), driver(), [seen(), other], [], [], NOW)
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
def test_folders_of_checkpoints(found: Folder, shared: bool, status: Status) -> None:
    job = config(checkpoint={"dir": "/data", "shared": shared})
    assert judged(having(folder=found), "checkpoints", job)[0] is status


def test_where_the_driver_cannot_write_nobody_can_see_what_it_has_written() -> None:
    job = config(checkpoint={"dir": "/data", "shared": True})
    home = replace(driver(), facts=FACTS.model_copy(update={"folder": Folder(problem="full")}))
    stage = having(folder=Folder(free_bytes=2**30))
    found = diagnose(job, home, [stage], [], [], NOW)
    failed = [(one.where, one.text) for one in found if one.status is Status.FAILED]
    assert failed == [
        ("driver", "nothing can be kept in /data: full"),
        ("driver", "10.0.0.1:50051: more than the one port that it should have"),
    ]


def test_more_listeners_than_there_should_be() -> None:
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
def test_refusals(error: RpcmpError, check: str, code: int) -> None:
    found = diagnose(config(), driver(), [seen(None, None, error)], [], [], NOW)
    assert exit_code(found) == code
    assert [one.check for one in found if one.where == "stage0"] == [check]


def test_what_is_away_does_not_hide_what_is_wrong() -> None:
    stages = [seen(None, None, UnreachableError("gone")), replace(having(listens=["a:1", "b:1"]))]
    assert exit_code(diagnose(config(), driver(), stages, [], [], NOW)) == 1


def test_links_say_what_they_carry() -> None:
    link = Link("stage0", "stage1", ("activations",))
    ways = [
        SeenLink(link, LinkSpeed(0.0015, 0.0, 125e6, 60e6)),
        SeenLink(link),
        SeenLink(link, error=UnreachableError("cut")),
    ]
    found = diagnose(config(), driver(), [seen()], [], ways, NOW)[-3:]
    assert [one.text for one in found] == [
        "activations: 1.5 ms, 125 MB/s there, 60 MB/s back",
        "activations: within one network",
        "cut",
    ]
    assert exit_code(found) == 75


def test_the_links_of_a_graph() -> None:
    shape = topology.build_graph(
        {"image": ["input.image"], "text": ["input.text"], "head": ["image", "text"]}
    )
    found = {
        (link.one, link.other): set(link.carries)
        for link in links(shape, workers("image", "text", "head"), [1, 2, 0])
    }
    assert found == {
        ("driver", "image"): {"batches"},
        ("driver", "text"): {"batches"},
        ("driver", "head"): {"batches"},
        ("image", "head"): {"activations", "snapshots", "rendezvous"},
        ("text", "head"): {"activations", "snapshots"},
        ("image", "text"): {"snapshots", "rendezvous"},
    }


def test_a_stage_in_the_middle_gets_no_batches() -> None:
    found = links(topology.chain_graph(["a", "b", "c"]), workers("a", "b", "c"), [None] * 3)
    assert Link("driver", "b", ("control",)) in found
    assert not Link("driver", "b", ("control",)).has_tensors
    assert Link("a", "c", ("rendezvous",)) in found


def test_a_driver_sends_no_batches_where_stages_load_their_samples() -> None:
    found = links(
        topology.chain_graph(["a", "b"]), workers("a", "b"), [None] * 2, sends_batches=False
    )
    assert [link.carries for link in found if link.one == "driver"] == [("control",)] * 2


def test_each_is_asked_for_what_will_be_built_there() -> None:
    job = config(checkpoint={"dir": "/data"})
    first, last, home = (
        checkup.of_stage(job, 0, ""),
        checkup.of_stage(job, 1, "m"),
        checkup.of_driver(job, ""),
    )
    assert set(first.callables) == {"model.layers", "optimizer"}
    assert set(last.callables) == {"model.layers", "optimizer", "loss", "metrics.accuracy"}
    assert set(home.callables) == {"model.layers", "data.train"}
    assert home.metrics == {"metrics.accuracy": "my_metrics:accuracy"}  # it may be the driver's
    without = checkup.of_stage(job, 1, "m", ["metrics.accuracy"])
    assert set(last.callables) - set(without.callables) == {"metrics.accuracy"}
    assert (last.folder, last.marker) == ("/data", "m")
    assert set(checkup.of_spare(job, "").callables) == set(last.callables)


def test_who_loads_the_samples_is_asked_for_the_datasets() -> None:
    data = {"train": "m:train", "test": "m:test", "at": "stage"}
    job = config(model={"layers": "m:layers", "balance": [1, 1, 1]}, data=data)
    first, middle, last = (checkup.of_stage(job, index, "") for index in range(3))
    asked = [{"data.train", "data.test"} <= set(each.callables) for each in (first, middle, last)]
    assert asked == [True, False, True]
    assert set(checkup.of_driver(job, "").callables) == {"model.layers"}


def test_a_stage_is_asked_for_the_optimizer_and_the_scheduler_of_its_own() -> None:
    own = {"optimizer": "m:Own", "scheduler": "m:Rate"}
    found = checkup.of_stage(
        config(model={"layers": "m:layers"}, stages=[own, {}]), 0, ""
    ).callables
    assert (found["stages.0.optimizer"], found["stages.0.scheduler"]) == ("m:Own", "m:Rate")
    assert "optimizer" not in found


def test_trying_a_folder_out_leaves_nothing_behind(tmp_path: Path) -> None:
    found = try_folder(tmp_path / "a" / "b")
    assert (found.problem, found.has_marker) == ("", False)
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    with marked(tmp_path) as marker:
        assert try_folder(tmp_path, marker).has_marker
    (tmp_path / "file").write_text("")
    assert try_folder(tmp_path / "file" / "b").problem == "Not a directory"


def test_code_is_all_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "rpcmp_test_package"
    (package / "inner").mkdir(parents=True)
    for made in (package, package / "inner"):
        (made / "__init__.py").write_text("")
    (package / "inner" / "deep.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = sha256_of(package.name)
    (package / "inner" / "deep.py").write_text("x = 2\n")
    assert sha256_of(package.name) != first
    (package / "inner" / "deep.py").write_text("x = 1\n")
    for name in ("notes", ".ipynb_checkpoints"):  # what a job would not send along
        (package / name).mkdir()
        (package / name / "deep.py").write_text("x = 3\n")
    assert sha256_of(package.name) == first
    with pytest.raises(ImportError, match="no module 'rpcmp_no_such_package'"):
        sha256_of("rpcmp_no_such_package")
