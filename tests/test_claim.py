"""Where a job's code may be unpacked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp.errors import ConfigError
from rpcmp.job import code
from rpcmp.server.claim import _unpack
from rpcmp.v1 import control_pb2 as pb


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The job's folder, inside of one that nothing may be written to."""
    inside = tmp_path / "outside" / "job"
    inside.mkdir(parents=True)
    return inside


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_code_lands_where_it_was(folder: Path) -> None:
    _unpack(pb.CodeFile(path="zoo/deep/net.py", content=b"x = 1\r\n"), folder)
    assert (folder / "zoo" / "deep" / "net.py").read_bytes() == b"x = 1\r\n"


def test_what_was_collected_is_unpacked_as_it_was(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "zoo").mkdir(parents=True)
    (source / "zoo" / "__init__.py").write_bytes(b"# \xff")
    (source / "model.py").write_bytes(b"")
    files = code.collect(source)
    for file in files:
        _unpack(file, folder)
    assert code.collect(folder) == files


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
def test_a_path_out_of_the_folder_is_refused_and_nothing_written(folder: Path, path: str) -> None:
    outside = folder.parent.parent
    before = everything_in(outside)
    with pytest.raises(ConfigError, match="refusing to unpack code"):
        _unpack(pb.CodeFile(path=path, content=b"evil"), folder)
    assert everything_in(outside) == before


def test_an_absolute_path_of_this_machine_is_refused(folder: Path) -> None:
    victim = folder.parent / "victim.py"
    with pytest.raises(ConfigError, match="refusing to unpack code"):
        _unpack(pb.CodeFile(path=str(victim), content=b"evil"), folder)
    assert not victim.exists()


@pytest.mark.parametrize("path", ["a\\..\\..\\b.py", "...", "..py", "~/model.py", "C:/model.py"])
def test_odd_names_stay_inside(folder: Path, path: str) -> None:
    _unpack(pb.CodeFile(path=path, content=b""), folder)
    written = [found for found in everything_in(folder.parent.parent) if found.is_file()]
    assert all(found.is_relative_to(folder) for found in written)
    assert len(written) == 1
