"""The folder of a job's unpacked Python files, and its removal; vitals by heartbeats."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.errors import ConfigError
from rpcmp.job.server_calls import collect_code
from rpcmp.process import resources
from rpcmp.process.activity import Doing
from rpcmp.server import claim_log
from rpcmp.server.claim_log import WorkerVitals
from rpcmp.v1 import control_pb2 as pb
from tests.support.codefolders import LEAVES


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace the folder for temporary files, and check that nothing outside of it was written."""
    folder = tmp_path / "outside" / "tmp"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(tmp_path / "outside") == ["tmp"]


def file(path: str, content: bytes = b"") -> pb.CodeFile:
    return pb.CodeFile(path=path, content=content)


def test_collected_code_is_unpacked_unchanged(temporary: Path) -> None:
    files = [file("model.py", b"x = 1\r\n"), file("zoo/__init__.py", b"# \xff"), file("zoo/net.py")]
    assert collect_code(claim_log.unpack(files)) == files


def test_each_job_has_a_private_code_folder(temporary: Path) -> None:
    folders = [claim_log.unpack([file("model.py")]) for _ in range(2)]
    assert folders[0] != folders[1]
    assert all(folder.parent == temporary for folder in folders)
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in folders)


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "/model.py",
        "//model.py",
        "../model.py",
        "zoo/../../model.py",
        "zoo/..",
        "zoo/../model.py",  # would stay inside, but no honest sender writes this
        "./../model.py",
    ],
)
def test_a_path_out_of_the_folder_is_refused_and_nothing_stays(temporary: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="refusing to unpack code"):
        claim_log.unpack([file("honest.py"), file(path, b"evil")])
    assert list(temporary.rglob("*")) == []


@pytest.mark.parametrize("path", ["a\\..\\..\\b.py", "...", "..py", "~/model.py", "C:/model.py"])
def test_odd_names_stay_inside_the_folder(temporary: Path, path: str) -> None:
    folder = claim_log.unpack([file(path)])
    written = [found for found in temporary.rglob("*") if found.is_file()]
    assert len(written) == 1
    assert written[0].is_relative_to(folder)


def test_a_removed_code_folder_leaves_nothing(temporary: Path) -> None:
    folder = claim_log.unpack([file("zoo/net.py")])
    resources.remove_folder(folder)
    resources.remove_folder(folder)  # the second time there is nothing to do
    assert list(temporary.iterdir()) == []


def test_sweep_removes_only_the_folders_of_dead_servers(temporary: Path) -> None:
    left = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, check=True
    )
    dead = Path(left.stdout.strip())
    assert (dead / "model.py").exists()
    ours = claim_log.unpack([file("model.py")])
    (other := temporary / "rpcmp-other").mkdir()
    (unlocked := temporary / "rpcmp-code-file").touch()
    resources.sweep(claim_log.PREFIX)
    assert not dead.exists()
    assert sorted(temporary.iterdir()) == sorted([other, ours, unlocked])


def test_a_heartbeat_without_new_counts_keeps_the_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10.0
    monkeypatch.setattr("rpcmp.server.claim_log.time.monotonic", lambda: now)
    vitals = WorkerVitals()
    vitals.update({"ways": [["127.0.0.2:1", 5, 6, 0.1]], "tensors": [["b:0", 7, 8, 0.0]]})
    now = 11.0
    vitals.update({"tensors": [["b:0", 70, 80, 0.0]], "in_flight": 3})
    found = vitals.message(0, Doing("", 0, -1, 0.0), {}, "cpu")
    assert [(way.peer, way.sent) for way in found.ways] == [("127.0.0.2:1", 5)]
    assert [(way.peer, way.sent) for way in found.tensors] == [("b:0", 7)]
    assert found.counted_s_ago == 1.0


def test_a_worker_that_is_gone_has_nothing_on_its_device() -> None:
    vitals = WorkerVitals()
    vitals.update({"device_memory": 300})
    for pid, expected in ((os.getpid(), 300), (0, 0)):
        found = vitals.message(pid, Doing("", 0, -1, 0.0), {}, "cuda:1")
        assert (found.device, found.device_memory) == ("cuda:1", expected)
