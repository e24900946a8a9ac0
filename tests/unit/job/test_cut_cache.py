"""Cuts are kept for the same code, and believed if this user has written them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.job import cut_cache
from rpcmp.job.cut_cache import CutCache

CUT = {"layers": ["a", "b"]}
KEY = {"code": "k", "environment": {}}
KEPT = {"key": KEY, "cut": CUT}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def job(tmp_path: Path, code: str = "x = 1", **model: object) -> Config:
    folder = tmp_path / "job"
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(code)
    data = {"loss": "m:loss", "model": {"module": "mine:Net", **model}}
    return parse_config(data).with_folder(folder)


def files(home: Path) -> list[Path]:
    return sorted((home / ".cache" / "rpcmp" / "cuts").iterdir())


def test_what_was_written_is_read_by_the_same_code(home: Path) -> None:
    cache = CutCache(job(home))
    assert cache.read() is None
    cache.write(KEY, CUT)
    assert CutCache(job(home)).read() == KEPT
    assert CutCache(job(home, split=["a"])).read() is None
    assert CutCache(job(home, "x = 2")).read() is None
    assert files(home)[0].parent.stat().st_mode & 0o777 == 0o700
    assert cut_cache.key_file() == home / ".local" / "state" / "rpcmp" / "cuts.key"
    assert cut_cache.key_file().stat().st_mode & 0o777 == 0o600


def test_an_unchanged_cut_is_not_written_again(home: Path) -> None:
    CutCache(job(home)).write(KEY, CUT)
    (file,) = files(home)
    before = file.stat().st_ino
    cache = CutCache(job(home))
    assert cache.read() == KEPT
    cache.write(KEY, CUT)
    assert file.stat().st_ino == before
    cache.write({"code": "another"}, CUT)
    assert CutCache(job(home)).read() == {"key": {"code": "another"}, "cut": CUT}


def test_what_others_have_left_is_not_believed(home: Path) -> None:
    ours, others = CutCache(job(home)), CutCache(job(home, "x = 2"))
    ours.write(KEY, CUT)
    others.write(KEY, CUT)
    first, second = files(home)
    mine = first.read_bytes()
    for hostile in (b"", mine[:40], mine[:-1], mine + b" ", second.read_bytes()):
        first.write_bytes(hostile)  # another job's is no better
        assert [CutCache(job(home)).read(), CutCache(job(home, "x = 2")).read()].count(None) == 1
    first.write_bytes(mine)
    cut_cache.key_file().unlink()
    assert CutCache(job(home)).read() is None  # by another key
    CutCache(job(home)).write(KEY, CUT)
    assert CutCache(job(home)).read() == KEPT


@pytest.mark.parametrize("change", ["readable by others", "short"])
def test_a_key_that_others_may_know_is_not_used(
    home: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    CutCache(job(home)).write(KEY, CUT)
    if change == "short":
        cut_cache.key_file().write_bytes(b"")
    else:
        cut_cache.key_file().chmod(0o640)
    assert CutCache(job(home)).read() is None
    CutCache(job(home)).write({"code": "another"}, CUT)
    assert "is not kept for the next run" in caplog.text
    assert "remove it" in caplog.text
    cut_cache.key_file().unlink()
    CutCache(job(home)).write(KEY, CUT)
    assert CutCache(job(home)).read() == KEPT


def test_a_home_that_cannot_be_written_to_is_done_without(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = job(home)
    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    cache = CutCache(config)
    assert cache.read() is None
    cache.write(KEY, CUT)
    assert "is not kept for the next run: NotADirectoryError" in caplog.text


def test_the_oldest_cuts_are_removed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_cache, "MAX_KEPT", 1)
    CutCache(job(home)).write(KEY, CUT)
    (first,) = files(home)
    os.utime(first, (0, 0))
    CutCache(job(home, "x = 2")).write(KEY, CUT)
    (second,) = files(home)
    assert first != second


def test_a_pipe_or_a_device_in_its_place_is_not_read(home: Path) -> None:
    CutCache(job(home)).write(KEY, CUT)
    (path,) = files(home)
    path.unlink()
    os.mkfifo(path)
    assert CutCache(job(home)).read() is None
    path.unlink()
    path.symlink_to("/dev/zero")
    assert CutCache(job(home)).read() is None
