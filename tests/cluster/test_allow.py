"""What a job may not do on a host: name what is not allowed, or reach files of its own choice."""

from __future__ import annotations

import json
import os
import random
import string
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rpcmp import factory, handoff
from rpcmp.balance import profile
from rpcmp.checkpoint import files
from rpcmp.checkpoint.folder import remove
from rpcmp.checkpoint.inside import Inside, beneath
from rpcmp.config import Config
from rpcmp.control.options import versions
from rpcmp.errors import CheckpointError, FactoryError
from rpcmp.examination.facts import HostFacts, Order
from rpcmp.plan import Assignment
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import doctor_pb2
from rpcmp.v1.control_pb2_grpc import ControlStub, SnapshotsStub
from rpcmp.v1.doctor_pb2_grpc import DoctorStub
from tests.support.processes import Server, running_servers

PACKAGE = """
import functools, os, subprocess, sys, torch
from os import system
from torch import nn
from torch.nn import Linear

class Net(nn.Sequential):
    run = staticmethod(system)
    module = os
    class Inner: ...
    @classmethod
    def small(cls): return cls()
    def __call__(self): ...

def layers(canary=None): return [("only", lambda: nn.Linear(2, 2))]
build = Net
partial = functools.partial(system, "true")
small = functools.partial(Net)
instance = Net()
bound = instance.forward
value = 3
sys.modules[__name__ + ".alias"] = torch
def __getattr__(name):
    if name == "lazy": return os
    raise AttributeError(name)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that imports what it does not define; its name. Names are limited to it."""
    name = f"allowed_{uuid.uuid4().hex[:8]}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    (tmp_path / name / "__main__.py").write_text("raise SystemExit('was run')")
    (tmp_path / name / "deep.py").write_text("from . import Net\ndef f(): ...\n")
    (tmp_path / f"{name}_too.py").write_text("def f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    factory.limit([name])
    yield name
    factory.limit(None)


@pytest.mark.parametrize(
    "attribute",
    [":layers", ":Net", ":build", ":Net.Inner", ":Net.small", ".deep:f", ".deep:Net", ":deep.f"],
)
def test_what_an_allowed_module_defines_is_found(package: str, attribute: str) -> None:
    if attribute == ":deep.f":
        factory.resolve(f"{package}.deep:f", "loss")  # imports it
    assert callable(factory.resolve(f"{package}{attribute}", "loss"))


@pytest.mark.parametrize(
    "name",
    [
        *("{}:torch.os.system", "{}:os.system", "{}:system", "{}:Linear", "{}:nn.Linear", "{}:os"),
        *("{}:Net.run", "{}:Net.module.system", "{}:Net.forward", "{}:Net.mro", "{}:Net.load"),
        *("{}:partial", "{}:small", "{}:instance", "{}:bound", "{}:value", "{}:lazy.system"),
        *("{}:layers.__globals__", "{}:Net.__init__.__builtins__", "{}:Net.__class__", "{}:deep"),
        *("{}.__main__:f", "{}.alias:load", "{}.alias.utils.cpp_extension:load", "{}_too:f"),
        *("{}.os:system", "{}/../os:system", "os:system", "pty:spawn", "builtins:exec", "tests:x"),
        *("torch:load", "torch.nn:DataParallel", "torch.nn:Module.__init__", "torch.nn:Parameter"),
        *("torch.nn.functional:importlib", "torch.nn:functional.math.sin", "torch.hub:load"),
        *("rpcmp.factory:create", "rpcmp.metrics:keeps_state", "rpcmp.examples.llama:layers"),
        "rpcmp.examples.encoder_decoder:text_of",
    ],
)
def test_what_is_defined_elsewhere_is_refused(package: str, name: str) -> None:
    with pytest.raises(FactoryError):
        factory.resolve(name.format(package), "loss")


@pytest.mark.parametrize(
    "name",
    [
        *("torch.nn:MSELoss", "torch.nn:Linear", "torch.nn.functional:cross_entropy"),
        *("torch.optim:AdamW", "torch.optim:Adafactor", "torch.optim.lr_scheduler:OneCycleLR"),
        *("rpcmp.metrics:accuracy", "rpcmp.examples.digits:layers", "rpcmp.examples.unet:Down"),
    ],
)
def test_what_trains_is_always_allowed(package: str, name: str) -> None:
    assert callable(factory.resolve(name, "loss"))


def test_messages_import_only_what_is_allowed(package: str) -> None:
    assert factory.allowed_among(["pty", package, "torch.nn"]) == [package, "torch.nn"]


STEPS = (
    *("torch", "os", "system", "nn", "Net", "layers", "deep", "f", "run", "module", "instance"),
    *("bound", "partial", "lazy", "alias", "functional", "__class__", "__globals__", "__dict__"),
    *("__init__", "__builtins__", "mro", "forward", "sys", "modules", "subprocess", "Popen"),
    *("optim", "Linear", "utils", "load", "Inner", "small", "functools", "", "..", "/", "\0", "ﬁ"),
)


def test_five_thousand_names_lead_nowhere_else(package: str) -> None:
    """Each is refused, or is a function or class that the package, or the fixed list, defines."""
    draw = random.Random(5)
    heads = [package, f"{package}.deep", f"{package}.alias", "torch.nn", "torch.optim", "os", "pty"]
    found = []
    for number in range(5000):
        steps = draw.choices(STEPS, k=draw.choice([1, 1, 1, 2, 3, 4, 5]))
        if number % 50 == 0:
            steps.append("".join(draw.choices(string.ascii_letters + "é\u0130ª", k=5000)))
        if draw.random() < 0.2:
            steps[0] = draw.choice([*dir(nn), *dir(torch.optim)])
        middle = draw.choice(["", "", "", "", f".{draw.choice(STEPS)}"])
        name = f"{draw.choice(heads)}{middle}:{'.'.join(steps)}"
        try:
            found.append((name, factory.resolve(name, "loss")))
        except FactoryError:
            continue
    assert len(found) > 20
    for name, target in found:
        home = getattr(target, "__func__", target)
        assert isinstance(home, FunctionType | type), name
        top = f"{home.__module__}.".startswith((f"{package}.", "torch.nn.modules.", "torch.optim."))
        assert top or home.__module__ == "torch.nn.functional", name
        assert not isinstance(target, ModuleType)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of checkpoints with links in it, beside a canary."""
    base = tmp_path_factory.mktemp("tree")
    (base / "canary").write_text("SECRET")
    (base / "step-00000001").mkdir()
    (base / "step-00000001" / "canary").write_text("SECRET")
    job = base / "root" / "job"
    (job / "step-00000002").mkdir(parents=True)
    (job / "step-00000002" / "a.safetensors").write_text("ours")
    (job / "out").symlink_to(base)
    (job / "up").symlink_to("../..")
    (job / "step-00000001").symlink_to(base / "step-00000001")
    (job / "circle").symlink_to("circle")
    (job / "proc").symlink_to("/proc/self/fd")
    (job / "step-00000002" / "link").symlink_to(base / "canary")
    os.mkfifo(job / "fifo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)  # ten thousand would take minutes
        yield base


NAMES = (
    *("..", ".", "", "/", "out", "up", "circle", "proc", "fifo", "canary", "step-00000001", "link"),
    *("step-00000002", "a.safetensors", "root", "job", "\0", "x" * 300, "~", "é"),
)
PIECES = st.one_of(st.sampled_from(NAMES), st.text(st.characters(codec="utf-8"), max_size=5))


@settings(max_examples=5000, deadline=None)
@given(start=st.integers(0, 3), pieces=st.lists(PIECES, max_size=6))
def test_five_thousand_paths_lead_nowhere_else(tree: Path, start: int, pieces: list[str]) -> None:
    """Reading, checking, writing and removing by path leave all outside as it is."""
    folder = beneath(tree / "root", str(tree / "root" / "job"))
    head = ["", "/", f"{folder}/", str(tree)][start]
    outside = {path: path.read_bytes() for path in tree.rglob("canary") if path.is_file()}
    assert len(outside) >= 2
    try:
        place = folder.at(head + "/".join(pieces))
    except CheckpointError:
        return
    try:
        assert files.check(place, "0" * 64, 6) in ("missing", "damaged")
        assert files.sha256_of(place) != files.sha256_of(tree / "canary")
    except OSError:
        pass
    for change in (lambda: files.write_durably(place / "new", [b"evil"]), lambda: remove(place)):
        try:
            change()
        except (OSError, CheckpointError):
            continue
    (tree / "root" / "job" / "step-00000002").mkdir(exist_ok=True)
    assert all(path.read_bytes() == content for path, content in outside.items())
    assert sorted(path.name for path in tree.iterdir()) == ["canary", "root", "step-00000001"]
    assert [path.name for path in (tree / "step-00000001").iterdir()] == ["canary"]


@pytest.mark.parametrize(
    "folder", ["/", "/etc", "relative", "/roots", "/root/../x", "\0", "/root/.."]
)
def test_a_folder_elsewhere_is_no_place(tmp_path: Path, folder: str) -> None:
    (tmp_path / "root").mkdir()
    given = folder if folder in ("/", "/etc", "relative", "\0") else f"{tmp_path}{folder}"
    with pytest.raises(CheckpointError):
        beneath(tmp_path / "root", given)


def test_a_link_that_is_made_meanwhile_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    place: Inside = beneath(tmp_path / "root", str(tmp_path / "root" / "job")) / "step" / "file"
    files.write_durably(place, [b"ours"])
    assert (tmp_path / "root" / "job").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "root" / "job" / "step" / "file").stat().st_mode & 0o777 == 0o600
    (tmp_path / "root" / "job" / "step").rename(tmp_path / "away")
    (tmp_path / "root" / "job" / "step").symlink_to(tmp_path / "away")
    assert files.check(place, "", 4) == "missing"
    with pytest.raises(OSError, match="Not a directory"):
        files.write_durably(place, [b"evil"])
    assert (tmp_path / "away" / "file").read_bytes() == b"ours"


# Servers


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        (("--no-code",), "pty:spawn"),
        (("--no-code",), "os:system"),
        (("--allow", "tests.zoo.models"), "tests.zoo.models:torch.os.system"),
        (("--allow", "tests.zoo.models"), "os:system"),
    ],
)
def test_a_server_runs_nothing_that_is_not_allowed(
    tmp_path: Path, options: tuple[str, ...], layers: str
) -> None:
    """The worker, the examination and the layers' profile all refuse it."""
    canary = tmp_path / "canary"
    order = Order(callables={"model.layers": layers}, devices=["cpu"], folder=str(tmp_path))
    with running_servers(1, *options, "--checkpoints", str(tmp_path / "saved")) as (server,):  # noqa: SIM117
        with grpc.insecure_channel(server.address) as channel:
            answer = DoctorStub(channel).Examine(
                doctor_pb2.ExamineRequest(
                    job=pb.PrepareRequest(versions=versions()), order=order.model_dump_json()
                ),
                timeout=120,
            )
            facts = HostFacts.model_validate_json(answer.facts)
            assert "--allow or --no-code" in facts.problems["model.layers"]
            assert facts.folder is not None
            assert "is neither" in facts.folder.problem
            assert list(tmp_path.iterdir()) == []
            kwargs = {"argv" if layers.startswith("pty") else "command": f"touch {canary}"}
            model = {"layers": layers, "kwargs": kwargs, "num_stages": 1}
            config = Config.model_validate({"loss": "torch.nn:MSELoss", "model": model, "steps": 1})
            sample = handoff.dumps([torch.ones(2, 2), torch.ones(2, 2)])
            measured = pb.ProfileRequest(
                job=pb.PrepareRequest(versions=versions()),
                order=profile.Order(config=config, differentiates=False).model_dump_json(),
                sample=sample,
            )
            with pytest.raises(grpc.RpcError, match="--allow or --no-code"):
                ControlStub(channel).Profile(measured, timeout=120)
            job = prepared(server, "")
            ControlStub(channel).Prepare(job, timeout=120)
            watched = ControlStub(channel).Watch(
                pb.WatchRequest(job_id=job.job_id, generation=1), timeout=120
            )
            ControlStub(channel).Start(
                pb.StartRequest(
                    job_id=job.job_id,
                    generation=1,
                    stage_name="stage0",
                    label="stage0",
                    rendezvous=server.address,
                    members=["stage0", "driver"],
                    assignment=Assignment(
                        config=config, stage_index=0, layers=["only"]
                    ).model_dump_json(),
                ),
                timeout=120,
            )
            error = next(change.error for change in watched if change.error)
            assert "--allow or --no-code" in error
            watched.cancel()  # type: ignore[no-untyped-call]
    assert not canary.exists()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server, and the folder above the one that its jobs' checkpoints may lie in."""
    base = tmp_path_factory.mktemp("guarded")
    (base / "canary").write_text("SECRET")
    with running_servers(1, "--checkpoints", str(base / "saved")) as (server,):
        yield server, base


def prepared(server: Server, folder: str, **more: Any) -> pb.PrepareRequest:
    return pb.PrepareRequest(
        job="evil",
        job_id=uuid.uuid4().hex,
        generation=1,
        versions=versions(),
        heartbeat_timeout=120,
        group=[pb.GroupStage(name="stage0", replicas=1)],
        checkpoint_folder=folder,
        **more,
    )


def _wanted(job: pb.PrepareRequest, path: str) -> pb.FetchRequest:
    return pb.FetchRequest(job_id=job.job_id, generation=job.generation, path=path)


@pytest.mark.parametrize("folder", ["/", "", "/saved/..", "/saved/../canary", "/savedtoo"])
def test_a_job_does_not_choose_where_checkpoints_lie(
    guarded: tuple[Server, Path], folder: str
) -> None:
    server, base = guarded
    place = folder if folder == "/" else f"{base}{folder}"
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError, match="--checkpoints"):
            ControlStub(channel).Prepare(prepared(server, place), timeout=120)
        job = prepared(server, place, may_keep_nothing=True)
        assert "--checkpoints" in ControlStub(channel).Prepare(job, timeout=120).keeps_nothing
        with pytest.raises(grpc.RpcError, match="--checkpoints"):
            list(
                SnapshotsStub(channel).Fetch(
                    _wanted(job, f"{base}/canary"),
                    timeout=120,
                )
            )
        ControlStub(channel).Stop(pb.StopRequest(job_id=job.job_id, generation=1), timeout=120)


def test_a_host_that_cannot_keep_checkpoints_refuses_the_job(guarded: tuple[Server, Path]) -> None:
    server, base = guarded
    (base / "saved").mkdir(exist_ok=True)
    (base / "saved" / "full").write_text("a file in the way")
    job = prepared(server, f"{base}/saved/full/kept")
    said = r"checkpoints cannot be written to .*/full/kept on"
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError, match=said):
        ControlStub(channel).Prepare(job, timeout=120)
    (base / "saved" / "full").unlink()


def test_a_job_reads_and_writes_no_file_outside_of_its_folder(
    guarded: tuple[Server, Path],
) -> None:
    server, base = guarded
    saved = base / "saved" / "job"
    job = prepared(server, str(saved))
    (saved / "step-00000001").mkdir(parents=True)
    (saved / "out").symlink_to(base)
    (saved / "step-00000001" / "link").symlink_to(base / "canary")
    evil = ["out/canary", "step-00000001/link", "../canary", "../../canary", "out/saved/x"]
    with grpc.insecure_channel(server.address) as channel:
        control, snapshots = ControlStub(channel), SnapshotsStub(channel)
        control.Prepare(job, timeout=120)
        for name in (*evil, "\0", "x" * 5000):
            file = pb.CheckpointFile(path=f"{saved}/{name}", size=4)
            with pytest.raises(grpc.RpcError):
                list(snapshots.Fetch(_wanted(job, file.path)))
            puts = [pb.PutRequest(job_id=job.job_id, file=file), pb.PutRequest(data=b"evil")]
            if name != "step-00000001/link":  # there a file replaces the link
                with pytest.raises(grpc.RpcError):
                    snapshots.Put(iter(puts), timeout=120)
            with pytest.raises(grpc.RpcError):
                snapshots.Remove(pb.RemoveRequest(folder=file.path), timeout=120)
        start = pb.StartRequest(job_id=job.job_id, generation=1, stage_name="../../evil")
        with pytest.raises(grpc.RpcError, match="cannot be the name of a file"):
            control.Start(start, timeout=120)
        file = pb.CheckpointFile(path=f"{saved}/step-00000002/a.safetensors", size=4)
        puts = [pb.PutRequest(job_id=job.job_id, file=file), pb.PutRequest(data=b"ours")]
        snapshots.Put(iter(puts), timeout=120)
        fetched = snapshots.Fetch(_wanted(job, file.path), timeout=120)
        assert b"".join(part.data for part in fetched) == b"ours"
        control.Stop(pb.StopRequest(job_id=job.job_id, generation=1), timeout=120)
    assert (base / "canary").read_text() == "SECRET"
    assert sorted(path.name for path in base.iterdir()) == ["canary", "saved"]
    assert json.dumps(sorted(path.name for path in (base / "saved").iterdir())) == '["job"]'
