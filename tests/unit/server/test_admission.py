"""Which jobs a server takes, by what it was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpcmp.checkpoint.files import Inside
from rpcmp.errors import ConfigError, RpcmpError, VersionError
from rpcmp.process.sandbox.confinement import FileAccess
from rpcmp.server.admission import Admission
from rpcmp.server.connection import versions
from rpcmp.server.snapshot_store import NO_FOLDER
from rpcmp.v1 import control_pb2 as pb

CODE = [pb.CodeFile(path="model.py")]


def request(**fields: Any) -> pb.PrepareRequest:
    return pb.PrepareRequest(**{"job": "j", "versions": versions(), **fields})


@pytest.mark.parametrize(
    ("admission", "job"),
    [
        (Admission(1, 2), request(stage_index=1, replica=2)),
        (Admission(None), request(stage_index=7, replica=3)),
        (Admission(0), request(code=CODE)),
        (Admission(0, accepts_code=False), request()),
        (Admission(0, allowed=["zoo"]), request()),
        (Admission(0), request(data_paths=["/anywhere"], init="/anywhere")),
        (Admission(0, file_access=FileAccess(("/data",))), request(data_paths=["/data/a"])),
    ],
)
def test_a_job_that_a_server_can_serve_is_taken(
    admission: Admission, job: pb.PrepareRequest
) -> None:
    admission.require(job, has_init=bool(job.init))


@pytest.mark.parametrize(
    ("admission", "job", "error", "why"),
    [
        (Admission(1), request(stage_index=0), ConfigError, "serves stage 1 replica 0, not stage"),
        (Admission(0, 1), request(), ConfigError, "serves stage 0 replica 1, not stage 0 replica"),
        (Admission(0), request(versions=pb.Versions()), VersionError, "other software than"),
        (Admission(0, accepts_code=False), request(code=CODE), ConfigError, "with --no-code and"),
        (Admission(0, allowed=["zoo"]), request(code=CODE), ConfigError, "with --allow and refuse"),
        (Admission(0, allowed=[]), request(code=CODE), ConfigError, "with --no-code and refuses 1"),
        (
            Admission(0, file_access=FileAccess(("/data",))),
            request(data_paths=["/home"]),
            ConfigError,
            "does not let jobs read /home",
        ),
        (
            Admission(0, file_access=FileAccess()),
            request(init="/weights"),
            ConfigError,
            "does not let jobs read /weights",
        ),
    ],
)
def test_any_other_job_is_refused_with_what_to_do(
    admission: Admission, job: pb.PrepareRequest, error: type[RpcmpError], why: str
) -> None:
    with pytest.raises(error, match=why):
        admission.require(job, has_init=bool(job.init))


def test_weights_that_are_sent_need_no_leave() -> None:
    Admission(0, file_access=FileAccess()).require(request(init="/weights"), has_init=False)


def test_checkpoints_lie_in_the_servers_folder_or_nowhere(tmp_path: Path) -> None:
    admission = Admission(0, checkpoints=tmp_path)
    assert admission.checkpoint_folder(request()) is NO_FOLDER
    own = request(checkpoint_folder=str(tmp_path / "run"), relative_checkpoint_folder="run")
    assert isinstance(found := admission.checkpoint_folder(own), Inside)
    assert found.real == tmp_path / "run"
    elsewhere = {"checkpoint_folder": "/elsewhere"}
    with pytest.raises(ConfigError, match="start `rpcmp serve` there with --checkpoints"):
        admission.checkpoint_folder(request(**elsewhere))
    reason = admission.checkpoint_folder(request(**elsewhere, may_keep_nothing=True))
    assert isinstance(reason, str)
    assert "cannot lie on" in reason
