"""Where a job's Python files are unpacked to, and what is left of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.errors import ConfigError
from rpcmp.job import code
from rpcmp.server import codefolder
from rpcmp.v1 import control_pb2 as pb

NOBODY = 2**22 + 1  # larger than any process id that Linux gives


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, inside of one that nothing may be written to."""
    folder = tmp_path / "outside" / "tmp"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert os.listdir(tmp_path) == ["outside"]
    assert os.listdir(tmp_path / "outside") == ["tmp"]


def file(path: str, content: bytes = b"") -> pb.CodeFile:
    return pb.CodeFile(path=path, content=content)


def test_what_was_collected_is_unpacked_as_it_was(temporary: Path) -> None:
    files = [file("model.py", b"x = 1\r\n"), file("zoo/__init__.py", b"# \xff"), file("zoo/net.py")]
    assert code.collect(codefolder.unpack(files)) == files


def test_every_job_has_a_folder_of_its_own_that_only_its_user_reads(temporary: Path) -> None:
    folders = [codefolder.unpack([file("model.py")]) for _ in range(2)]
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
        "zoo/../model.py",  # would stay inside, but nobody writes this honestly
        "./../model.py",
    ],
)
def test_a_path_out_of_the_folder_is_refused_and_nothing_stays(temporary: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="refusing to unpack code"):
        codefolder.unpack([file("honest.py"), file(path, b"evil")])
    assert list(temporary.rglob("*")) == []


def test_an_absolute_path_of_this_machine_is_refused(temporary: Path) -> None:
    victim = temporary.parent / "victim.py"
    with pytest.raises(ConfigError, match="refusing to unpack code"):
        codefolder.unpack([file(str(victim), b"evil")])
    assert not victim.exists()


@pytest.mark.parametrize("path", ["a\\..\\..\\b.py", "...", "..py", "~/model.py", "C:/model.py"])
def test_odd_names_stay_inside(temporary: Path, path: str) -> None:
    folder = codefolder.unpack([file(path)])
    written = [found for found in temporary.rglob("*") if found.is_file()]
    assert len(written) == 1
    assert written[0].is_relative_to(folder)


def test_removing_leaves_nothing(temporary: Path) -> None:
    folder = codefolder.unpack([file("zoo/net.py")])
    codefolder.remove(folder)
    codefolder.remove(folder)  # the second time there is nothing to do
    assert list(temporary.iterdir()) == []


def test_sweeping_removes_what_dead_servers_left_and_nothing_else(temporary: Path) -> None:
    ours = codefolder.unpack([file("model.py")])
    dead = ours.rename(temporary / ours.name.replace(str(os.getpid()), str(NOBODY)))
    ours = codefolder.unpack([file("model.py")])
    (other := temporary / f"other-{NOBODY}-x").mkdir()
    codefolder.sweep()
    assert not dead.exists()
    assert sorted(temporary.iterdir()) == sorted([other, ours])


def test_sweeping_does_not_follow_links(temporary: Path) -> None:
    (kept := temporary / "kept").mkdir()
    (kept / "file").touch()
    (temporary / f"rpcmp-code-{NOBODY}-x").symlink_to(kept)
    codefolder.sweep()
    assert (kept / "file").exists()


@pytest.mark.parametrize("pid", ["x", "", "-1", "99999999999999999999"])
def test_sweeping_is_not_stopped_by_odd_names_of_others(temporary: Path, pid: str) -> None:
    for name in (pid, str(NOBODY)):
        (temporary / f"rpcmp-code-{name}-x").mkdir()
    codefolder.sweep()
    assert not (temporary / f"rpcmp-code-{NOBODY}-x").exists()
