"""The limits of a job on a host: it runs only allowed code, and does not choose files.

Names alone are tested in tests/unit/config/test_importing_allowlist.py, and paths alone in
tests/unit/checkpoint/test_files.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from rpcmp.config.job_sections import ModelCut
from rpcmp.config.schema import Config
from rpcmp.pipelining import partition
from rpcmp.pipelining.assignment import Assignment
from rpcmp.rpc import tensors
from rpcmp.server.connection import versions
from rpcmp.server.host_facts import CheckRequest, HostFacts
from rpcmp.splitting.program import Node
from rpcmp.splitting.split import split_module
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1 import doctor_pb2
from rpcmp.v1.control_pb2_grpc import ControlStub, SnapshotsStub
from rpcmp.v1.doctor_pb2_grpc import DoctorStub
from tests.support.claims import prepared
from tests.support.processes import Server, running_servers


def error_of_worker(
    channel: grpc.Channel, server: Server, config: Config, layers: list[str]
) -> str:
    """Start a worker of the only stage, and return the error that it ends with."""
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
            rendezvous=server.address,
            members=["stage0", "driver"],
            assignment=Assignment(config=config, stage_index=0, layers=layers).model_dump_json(),
        ),
        timeout=120,
    )
    error: str = next(change.error for change in watched if change.error)
    watched.cancel()  # type: ignore[no-untyped-call]
    return error


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        (("--no-code",), "pty:spawn"),
        pytest.param(("--no-code",), "os:system", marks=pytest.mark.cluster),
        (("--allow", "tests.zoo.models"), "tests.zoo.models:torch.os.system"),
        pytest.param(("--allow", "tests.zoo.models"), "os:system", marks=pytest.mark.cluster),
    ],
)
def test_a_server_runs_only_code_that_its_allow_list_names(
    tmp_path: Path, options: tuple[str, ...], layers: str
) -> None:
    """The worker, the examination and the layers' profile all refuse other code."""
    canary = tmp_path / "canary"
    order = CheckRequest(callables={"model.layers": layers}, devices=["cpu"], folder=str(tmp_path))
    places = ("--checkpoints", str(tmp_path / "saved"))
    with (
        running_servers(1, *options, *places, apart=False) as (server,),
        grpc.insecure_channel(server.address) as channel,
    ):
        answer = DoctorStub(channel).Examine(
            doctor_pb2.ExamineRequest(
                job=pb.PrepareRequest(versions=versions(), threads=1), order=order.model_dump_json()
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
        sample = tensors.dump_message([torch.ones(2, 2), torch.ones(2, 2)])
        measured = pb.ProfileRequest(
            job=pb.PrepareRequest(versions=versions(), threads=1),
            order=partition.ProfileOrder(config=config, differentiates=False).model_dump_json(),
            sample=sample,
        )
        with pytest.raises(grpc.RpcError, match="--allow or --no-code"):
            ControlStub(channel).Profile(measured, timeout=120)
        error = error_of_worker(channel, server, config, ["only"])
        assert "--allow or --no-code" in error
    assert not canary.exists()


@pytest.mark.parametrize(
    ("calls", "args"),
    [
        ("aten._assert_async.msg", [{"of": "linear"}, '"); system("touch PATH"); ("']),
        ("aten.max_pool2d_with_indices_backward.default", [{"of": "linear"}] * 2),
    ],
)
def test_a_server_without_code_runs_no_operation_that_trusts_its_arguments(
    tmp_path: Path, calls: str, args: list[Any]
) -> None:
    split = split_module(nn.Linear(2, 2), torch.ones(2, 2))
    (layer,) = split.layers
    program = layer.training
    canary = tmp_path / "canary"
    given = [each.replace("PATH", str(canary)) if isinstance(each, str) else each for each in args]
    more = Node(name="hostile", calls=calls, args=given)
    program = program.model_copy(update={"nodes": [*program.nodes, more]})
    hostile = split.model_copy(
        update={"layers": [layer.model_copy(update={"training": program, "evaluation": program})]}
    )
    model = {"module": "torch.nn:Linear", "kwargs": {"in_features": 2, "out_features": 2}}
    config = Config.model_validate(
        {"loss": "torch.nn:MSELoss", "model": {**model, "num_stages": 1}, "compile": True}
    ).with_cut(ModelCut(layers=[layer.name], split=hostile.pack()))
    with (
        running_servers(1, "--no-code", apart=False) as (server,),
        grpc.insecure_channel(server.address) as channel,
    ):
        error = error_of_worker(channel, server, config, [layer.name])
    assert f"a cut module calls '{calls}', and a server that was started with --no-code" in error
    assert not canary.exists()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """Yield a server, and the parent of the folder that its checkpoints may be in."""
    base = tmp_path_factory.mktemp("guarded")
    (base / "canary").write_text("SECRET")
    with running_servers(1, "--checkpoints", str(base / "saved"), apart=False) as (server,):
        yield server, base


def _wanted(job: pb.PrepareRequest, path: str) -> pb.FetchRequest:
    return pb.FetchRequest(job_id=job.job_id, generation=job.generation, path=path)


@pytest.mark.parametrize("folder", ["/", "", "/saved/..", "/saved/../canary", "/savedtoo"])
def test_the_server_chooses_the_checkpoint_folder_not_the_job(
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


def test_a_host_without_a_checkpoint_folder_refuses_the_job(guarded: tuple[Server, Path]) -> None:
    server, base = guarded
    (base / "saved").mkdir(exist_ok=True)
    (base / "saved" / "full").write_text("a file in the way")
    job = prepared(server, f"{base}/saved/full/kept")
    message = r"checkpoints cannot be written to .*/full/kept on"
    with (
        grpc.insecure_channel(server.address) as channel,
        pytest.raises(grpc.RpcError, match=message),
    ):
        ControlStub(channel).Prepare(job, timeout=120)
    (base / "saved" / "full").unlink()


def test_a_job_cannot_read_or_write_files_outside_its_folder(
    guarded: tuple[Server, Path],
) -> None:
    server, base = guarded
    saved = base / "saved" / "job"
    job = prepared(server, str(saved))
    ours = saved / "step-00000001" / "a.safetensors"
    ours.parent.mkdir(parents=True)
    ours.write_bytes(b"ours")
    (saved / "out").symlink_to(base)
    (saved / "step-00000001" / "link.safetensors").symlink_to(base / "canary")
    evil = [
        *("out/canary", "step-00000001/link.safetensors", "../canary", "../../canary"),
        *("out/saved/x", ".ssh/authorized_keys", "usercustomize.py", "step-00000001/x.py"),
        *("step-1/a.safetensors", "\0", "x" * 5000),
    ]
    with grpc.insecure_channel(server.address) as channel:
        control, snapshots = ControlStub(channel), SnapshotsStub(channel)
        control.Prepare(job, timeout=120)
        start = pb.StartRequest(job_id=job.job_id, generation=1, stage_name="stage0")
        for name in evil:
            file = pb.CheckpointFile(path=f"{saved}/{name}", size=4, address=server.address)
            with pytest.raises(grpc.RpcError):
                list(snapshots.Fetch(_wanted(job, file.path), timeout=120))
            init = pb.PutRequest(job_id=job.job_id, generation=1, file=file, is_init=True)
            with pytest.raises(grpc.RpcError, match="is no file of weights"):
                snapshots.Put(iter([init]), timeout=120)
            if name != "step-00000001/link.safetensors":  # a file replaces the link
                with pytest.raises(grpc.RpcError, match=r"checkpoint|name of a file"):
                    snapshots.Put(iter([pb.PutRequest(job_id=job.job_id, file=file)]), timeout=120)
                with pytest.raises(grpc.RpcError, match=r"checkpoint|name of a file"):
                    snapshots.Check(pb.CheckRequest(files=[file]), timeout=120)
                start.restore.CopyFrom(pb.Restore(step=1, files=[file]))
                with pytest.raises(grpc.RpcError, match=r"checkpoint|name of a file"):
                    control.Start(start, timeout=120)
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
        with pytest.raises(grpc.RpcError, match="the driver has named no file"):  # of another run
            list(snapshots.Fetch(_wanted(job, str(ours)), timeout=120))
        named = pb.CheckpointFile(path=str(ours), size=4)
        snapshots.Check(pb.CheckRequest(files=[named]), timeout=120)
        fetched = snapshots.Fetch(_wanted(job, str(ours)), timeout=120)
        assert b"".join(part.data for part in fetched) == b"ours"
        control.Stop(pb.StopRequest(job_id=job.job_id, generation=1), timeout=120)
    assert (base / "canary").read_text() == "SECRET"
    assert sorted(path.name for path in base.iterdir()) == ["canary", "saved"]
    assert json.dumps(sorted(path.name for path in (base / "saved").iterdir())) == '["job"]'
