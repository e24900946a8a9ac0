"""Checkpoints on disk: whole writes, detected damage, and removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.checkpoint import files
from rpcmp.checkpoint.files import Written, check, require_place, write_durably
from rpcmp.checkpoint.folder import (
    CheckpointFolder,
    left_behind,
    look,
    new_name,
    newest_in,
    remove,
    require_name,
    require_none_asked_for,
    runs_in,
    step_of,
)
from rpcmp.checkpoint.manifest import BestMark, check_model, dumps, loads
from rpcmp.errors import CheckpointConflictError, CheckpointError, ConfigError
from tests.support.manifests import SHA, manifest, stage


def resealed(**changes: Any) -> str:
    """Return a manifest with other content and a matching hash."""
    data = {**json.loads(dumps(manifest())), **changes}
    del data["sha256"]
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return json.dumps({**data, "sha256": hashlib.sha256(canonical.encode()).hexdigest()})


# The manifest


def test_a_manifest_is_read_as_it_was_written() -> None:
    written = manifest()
    assert loads(dumps(written), "m") == written
    assert loads(dumps(written).encode(), "m") == written
    assert written.layers == ["embed", "hidden", "head"]
    assert written.files == ["stage0.safetensors", "stage1.safetensors"]


SHORT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | SHORT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHORT, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(SHORT, JSON, max_size=4), st.text())
def test_any_state_comes_back(state: dict[str, Any], text: str) -> None:
    written = manifest(driver=state, config=state, job=text)
    assert loads(dumps(written), "m") == written


def test_a_state_that_is_not_a_number_comes_back() -> None:
    read = loads(dumps(manifest(driver={"loss": math.nan, "best": math.inf})), "m")
    assert math.isnan(read.driver["loss"])  # type: ignore[arg-type]
    assert read.driver["best"] == math.inf


def test_the_hash_covers_the_canonical_manifest() -> None:
    assert resealed() == json.dumps(json.loads(dumps(manifest())))


TEXT = dumps(manifest()).encode()


@given(st.integers(0, len(TEXT) * 8 - 1))
def test_a_flipped_bit_is_detected(bit: int) -> None:
    damaged = bytearray(TEXT)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointError, match=r"^m "):
        loads(bytes(damaged), "m")


@given(st.integers(0, len(TEXT) - 2))
def test_a_truncated_manifest_is_detected(length: int) -> None:
    with pytest.raises(CheckpointError, match=r"^m is damaged or cut off, not JSON: "):
        loads(TEXT[:length], "m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "m is damaged: not a JSON object"),
        ("[" * 100_000, "m is damaged or cut off, not JSON"),
        ("{}", "m has format None; this rpcmp reads format 1"),
        (resealed(format=2), "m has format 2; this rpcmp reads format 1"),
        (resealed(surprise=1), "m is no manifest of this rpcmp: surprise: unknown key"),
        (resealed(step="1"), "step: Input should be a valid integer"),
        (resealed(cursor={"epoch": 0, "batch": 0}), r"cursor\.epoch: Input should be greater"),
        (resealed(stages=[stage().model_dump()] * 2), "two stages have 'stage0'"),
        (
            resealed(stages=[{**stage().model_dump(), "file": "../../etc/x.safetensors"}]),
            r"stages\.0\.file: ",
        ),
        (
            resealed(stages=[{**stage().model_dump(), "sha256": SHA.upper()}]),
            r"stages\.0\.sha256: ",
        ),
    ],
)
def test_the_problem_of_a_manifest_is_named(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        loads(text, "m")


def test_a_checkpoint_of_another_model_names_the_difference() -> None:
    written = manifest()
    check_model(written, ["embed", "hidden", "head"])
    for layers, message in [
        (["embed", "head"], "the model has no 'hidden'$"),
        (["embed", "new", "hidden", "head"], "it has no 'new'$"),
        (["embed", "new", "head"], "it has no 'new'; the model has no 'hidden'$"),
        (["hidden", "embed", "head"], "its layer 1 is 'embed', the model's is 'hidden'$"),
        (["embed", "hidden", "head", "head"], "its layer 4 is None, the model's is 'head'$"),
        ([f"l{i}" for i in range(9)], "it has no 'l0', 'l1', 'l2', 'l3', 'l4' and 4 more; "),
    ]:
        with pytest.raises(CheckpointError, match=f"of step 120 of job 'digits' .*{message}"):
            check_model(written, layers)


# Files


@contextlib.contextmanager
def unsynced() -> Iterator[None]:
    """Skip syncing files to disk, which would take long for hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@given(chunks=st.lists(st.binary(max_size=50)))
def test_a_file_holds_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("files") / "new" / "folder" / "file"
    with unsynced():
        written = write_durably(path, iter(chunks))
    whole = b"".join(chunks)
    assert path.read_bytes() == whole
    assert written == Written(hashlib.sha256(whole).hexdigest(), len(whole))
    assert check(path, written.sha256, written.size) == "ok"
    assert list(path.parent.iterdir()) == [path]


def test_memory_of_any_type_is_written(tmp_path: Path) -> None:
    wide = memoryview(b"01234567").cast("I")
    assert write_durably(tmp_path / "file", [wide, memoryview(b"89")]).size == 10
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_file_that_is_longer_than_a_block_is_hashed_whole(tmp_path: Path) -> None:
    data = os.urandom(files.BLOCK * 2 + 5)
    written = write_durably(tmp_path / "file", [data])
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    assert check(tmp_path / "file", written.sha256, written.size) == "ok"


def test_memory_is_copied_without_the_page_cache_except_for_partial_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(files.BLOCK + 5 * files.ALIGNMENT + 7)
    (tmp_path / "memory").write_bytes(data)
    asked, control = [], fcntl.fcntl

    def recorded_fcntl(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL:  # that a file system may refuse
            asked.append(bool(flags & os.O_DIRECT))
        return control(fd, command, flags)

    with (tmp_path / "memory").open("rb") as memory, monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", recorded_fcntl)
        for length in (len(data), len(data) - 7):
            found = files.copy_durably(tmp_path / "file", memory.fileno(), length)
            assert (tmp_path / "file").read_bytes() == data[:length]
            assert found == Written(hashlib.sha256(data[:length]).hexdigest(), length)
    assert asked == [True, False, True, True]


def fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("before", [None, b"as it was"])
def test_a_write_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, before: bytes | None
) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(OSError, match="No space left"):
            write_durably(path, [b"abc"])
    found = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    assert found == ({} if before is None else {"file": before})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_chunks_that_end_in_an_error_leave_nothing(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"abc"
        (temporary,) = tmp_path.iterdir()
        assert re.fullmatch(r"\.[0-9a-f]{32}\.tmp", temporary.name)
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        raise error

    with pytest.raises(error):
        write_durably(tmp_path / "file", chunks())
    assert list(tmp_path.iterdir()) == []


def test_new_files_and_folders_are_synced_before_the_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    write_durably(tmp_path / "a" / "b" / "file", [b"abc"])
    folders = [str(tmp_path), str(tmp_path / "a")]
    assert synced[:2] == folders
    assert re.fullmatch(rf"{tmp_path}/a/b/\.[0-9a-f]{{32}}\.tmp", synced[2])
    assert synced[3:] == [str(tmp_path / "a" / "b")]


def test_a_file_system_that_cannot_sync_folders_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    with files.folder_of(tmp_path / "file") as folder:
        files.sync(folder)
    monkeypatch.setattr(os, "fsync", fails)
    with (
        files.folder_of(tmp_path / "file") as folder,
        pytest.raises(OSError, match="No space"),
    ):
        files.sync(folder)


def test_damage_to_a_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert check(path, SHA, 3) == "missing"
    assert check(tmp_path / "nowhere" / "file", SHA, 3) == "missing"
    path.write_bytes(b"abc")
    assert check(path, SHA, 3) == "ok"
    assert check(path / "below", SHA, 3) == "missing"
    for content in (b"abb", b"ab", b"abc\0", b""):
        path.write_bytes(content)
        assert check(path, SHA, 3) == "damaged"
    assert check(tmp_path, SHA, 3) == "damaged"


def test_the_size_is_compared_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"ab")
    monkeypatch.setattr(hashlib, "file_digest", fails)
    assert check(tmp_path / "file", SHA, 3) == "damaged"


def test_a_disk_that_cannot_read_a_file_has_damaged_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "file").write_bytes(b"abc")
    monkeypatch.setattr(hashlib, "file_digest", unreadable)
    assert check(tmp_path / "file", SHA, 3) == "damaged"
    monkeypatch.setattr(hashlib, "file_digest", fails)
    with pytest.raises(OSError, match="No space"):
        check(tmp_path / "file", SHA, 3)


# The folder


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """An empty folder that does not exist yet."""
    return CheckpointFolder(tmp_path / "checkpoints")


def damage(folder: CheckpointFolder, step: int) -> None:
    path = folder.path_of(step) / "manifest.json"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def steps(paths: list[Path]) -> list[int | None]:
    return [step_of(path) for path in paths]


def test_a_step_folder_is_named_after_its_step(folder: CheckpointFolder) -> None:
    assert folder.path_of(120).name == "step-00000120"
    for step in (0, 120, 99_999_999, 100_000_000, 12_345_678_901):
        assert step_of(folder.path_of(step)) == step
    for name in ("step-120", "step-000000120", "step-00000120.old", "step-0000012x", "manifest"):
        assert step_of(folder.path / name) is None


def test_a_committed_checkpoint_is_found(folder: CheckpointFolder) -> None:
    assert folder.found() == []
    for step in (20, 100_000_000, 3):
        folder.commit(manifest(step))
    assert [found.step for found in folder.valid()] == [100_000_000, 20, 3]
    newest = folder.found()[0]
    assert (newest.path, newest.problem) == (folder.path_of(100_000_000), "")
    assert newest.manifest == manifest(100_000_000)


def test_a_folder_that_is_not_a_checkpoint_is_skipped(folder: CheckpointFolder) -> None:
    folder.path_of(9).mkdir(parents=True)
    (folder.path_of(9) / "stage0.safetensors").write_bytes(b"abc")
    folder.path_of(8).write_bytes(b"a file")
    (folder.path / "notes").mkdir()
    folder.commit(manifest(7))
    assert [found.path for found in folder.found()] == [folder.path_of(7)]
    assert look(folder.path_of(8)) is None


def test_a_damaged_manifest_is_listed_with_its_problem(folder: CheckpointFolder) -> None:
    for step in (1, 2, 3, 4, 5):
        folder.commit(manifest(step))
    damage(folder, 5)
    whole = (folder.path_of(4) / "manifest.json").read_bytes()
    (folder.path_of(4) / "manifest.json").write_bytes(whole[:-20])
    folder.path_of(3).rename(folder.path_of(6))
    (folder.path_of(2) / "manifest.json").unlink()
    (folder.path_of(2) / "manifest.json").mkdir()
    found = folder.found()
    assert steps([one.path for one in found]) == [6, 5, 4, 2, 1]
    problems = ["is the manifest of step 3", "is damaged", "is damaged or cut off", "Is a dir", ""]
    for one, problem in zip(found, problems, strict=True):
        assert problem in one.problem
        assert (one.manifest is None) == bool(problem)
        assert not problem or str(one.path) in one.problem
    assert folder.valid() == [manifest(1)]


def test_a_folder_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = CheckpointFolder(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"cannot read .*/file: Not a directory"):
        folder.found()
    with pytest.raises(CheckpointError, match=r"cannot write .*/manifest.json: Not a directory"):
        folder.commit(manifest())


def test_require_place_tries_a_folder_and_leaves_it_empty(tmp_path: Path) -> None:
    require_place(tmp_path / "new" / "place")
    assert list((tmp_path / "new" / "place").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written to .*/file on .*: Not a directory"):
        require_place(tmp_path / "file")


def test_the_newest_valid_checkpoints_are_kept(folder: CheckpointFolder) -> None:
    for step in (10, 20, 30, 40, 50):
        folder.commit(manifest(step))
    damage(folder, 50)  # newer than all that is valid: it may be looked at, and be overwritten
    damage(folder, 30)
    for step in (5, 35, 60):  # never completed; the last is being written
        folder.path_of(step).mkdir()
    assert steps(folder.surplus(1)) == [35, 30, 20, 10, 5]
    assert steps(folder.surplus(2)) == [35, 30, 10, 5]
    assert steps(folder.surplus(9)) == [35, 30, 5]
    assert steps(folder.surplus(0)) == steps(folder.surplus(1))


def test_no_checkpoint_is_surplus_if_none_is_valid(folder: CheckpointFolder) -> None:
    assert folder.surplus(1) == []
    folder.path_of(1).mkdir(parents=True)
    folder.commit(manifest(2))
    damage(folder, 2)
    assert folder.surplus(1) == []


def test_the_best_is_kept_however_old_it_is(folder: CheckpointFolder) -> None:
    assert folder.best() is None
    mark = BestMark(metric="loss", value=0.5)
    for step in (10, 20, 30, 40, 50):
        folder.commit(manifest(step, best=mark if step in (10, 20) else None))
    best = folder.best()
    assert best is not None
    assert (best.step, best.best) == (20, mark)  # what was the best before is marked as well
    assert steps(folder.surplus(1)) == [40, 30, 10]
    assert steps(folder.surplus(4)) == [10]
    folder.commit(manifest(50, best=mark))
    assert steps(folder.surplus(1)) == [40, 30, 20, 10]
    damage(folder, 50)
    assert folder.best() == manifest(20, best=mark)


@given(
    valid=st.sets(st.integers(0, 30), max_size=8),
    unfinished=st.sets(st.integers(0, 30), max_size=8),
    keep=st.integers(1, 4),
)
def test_pruning_leaves_the_newest(
    tmp_path_factory: pytest.TempPathFactory, valid: set[int], unfinished: set[int], keep: int
) -> None:
    folder = CheckpointFolder(tmp_path_factory.mktemp("prune"))
    with unsynced():
        for step in valid:
            folder.commit(manifest(step))
    for step in unfinished - valid:
        folder.path_of(step).mkdir()
    for path in folder.surplus(keep):
        remove(path)
    left = sorted(valid)[-keep:]
    assert sorted(found.step for found in folder.valid()) == left
    newer = {step for step in unfinished - valid if not left or step > left[-1]}
    assert {step_of(path) for path in folder.path.iterdir()} == newer | set(left)


def test_a_checkpoint_is_removed_whole_and_does_not_exist_while_half_of_it_does(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.commit(manifest())
    path = folder.path_of(120)
    (path / "stage0.safetensors").write_bytes(b"abc")
    (path / "stage1.safetensors.77.tmp").write_bytes(b"a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fails)
        with pytest.raises(CheckpointError, match=r"cannot remove .*00120: No space left"):
            remove(path)
    assert path.exists()
    assert folder.found() == []
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        remove(path)
        assert not path.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_step_folders_are_removed(folder: CheckpointFolder) -> None:
    folder.commit(manifest())
    with pytest.raises(CheckpointError, match="no step folder"):
        remove(folder.path)
    assert folder.valid() == [manifest()]


def left(folder: Path, name: str, step: int = 120, **fields: Any) -> Path:
    """Create the checkpoint of a run without a [checkpoint] section."""
    fields = {"job": "job", "is_asked_for": False, **fields}
    CheckpointFolder(folder / name).commit(manifest(step, **fields))
    return folder / name


OLDER, NEWER = "20251122-101500-3f9a2c", "20251122-101501-000000"


def test_runs_have_folders_of_their_own(tmp_path: Path) -> None:
    assert runs_in(tmp_path / "none") == []
    assert newest_in(tmp_path) is None
    left(tmp_path, OLDER, 30, written="2025-11-22T10:15:00+00:00")
    left(tmp_path, NEWER, 20, written="2025-11-22T10:15:01+00:00")
    left(tmp_path, "", 10, written="2025-01-01T00:00:00")  # by itself: rpcmp 0.1 wrote so
    (tmp_path / NEWER / "step-00000021").mkdir()
    left(tmp_path, "someone's own", 99)
    assert [(run.name, run.last_step) for run in runs_in(tmp_path)] == [
        (NEWER, 20),
        (OLDER, 30),
        ("", 10),
    ]
    left(tmp_path, "20251122-101502-00000f", 5, job="other", written="2025-11-22T10:15:02+00:00")
    newest, ours = newest_in(tmp_path), newest_in(tmp_path, "job")
    assert newest is not None
    assert newest.name == "20251122-101502-00000f"
    assert ours is not None
    assert ours.name == NEWER
    assert new_name("0123456789abcdef").endswith("-012345")


def test_only_a_checkpoint_that_the_config_asked_for_makes_a_new_run_ask(tmp_path: Path) -> None:
    require_none_asked_for(tmp_path / "none")
    left(tmp_path, OLDER)
    require_none_asked_for(tmp_path)
    left(tmp_path, NEWER, is_asked_for=True)
    with pytest.raises(
        CheckpointConflictError, match="another run: job 'job', step 120, "
    ) as caught:
        require_none_asked_for(tmp_path)
    for part in (str(tmp_path), "2025-01-02T03:04:05", "--resume", "--fresh"):
        assert part in str(caught.value)
    assert [run.name for run in left_behind(tmp_path, "job", asks=True)] == [OLDER]
    assert len(left_behind(tmp_path, "job", asks=False)) == 2  # rpcmp 0.1 did not tell them apart
    assert left_behind(tmp_path, "another", asks=False) == []


def test_a_damaged_checkpoint_does_not_block_a_new_run(tmp_path: Path) -> None:
    damage(CheckpointFolder(left(tmp_path, OLDER, is_asked_for=True)), 120)
    require_none_asked_for(tmp_path)
    (run,) = runs_in(tmp_path)
    assert run.newest is None
    assert "manifest.json" in str(run)
    assert left_behind(tmp_path, "job", asks=False) == []
    left(tmp_path, NEWER, written="2025-11-22T10:15:01+00:00")
    newest = newest_in(tmp_path, "job")
    assert newest is not None
    assert newest.name == OLDER  # by its folder's time, and not passed over


def test_a_run_is_removed_with_its_folder_but_nothing_else(tmp_path: Path) -> None:
    run = left(tmp_path, OLDER)
    (run / "mine").write_text("not ours")
    with pytest.raises(CheckpointError, match="cannot remove"):
        remove(run)
    (run / "mine").unlink()
    remove(run)
    assert not run.exists()
    remove(run)  # by another host, where they share the folder
    with pytest.raises(CheckpointError, match="is no step folder"):
        remove(tmp_path)


@pytest.mark.parametrize(
    ("path", "is_made"),
    [
        ("step-00000001", True),
        ("step-00000001/stage0.safetensors", True),
        ("20261122-101500-3f9a2c", True),
        ("20261122-101500-3f9a2c/step-100000000/a_b-c.safetensors", True),
        ("", False),
        ("step-1", False),
        ("step-00000001/.safetensors", False),
        ("step-00000001/a.safetensors/b", False),
        ("step-00000001/step-00000001", False),
        ("20261122-101500-3f9a2c/20261122-101500-3f9a2c", False),
        (".ssh/authorized_keys", False),
        ("step-00000001/sitecustomize.py", False),
        ("a.safetensors", False),
    ],
)
def test_messages_name_nothing_but_what_a_run_makes(path: str, is_made: bool) -> None:
    parts = tuple(path.split("/")) if path else ()
    if is_made:
        require_name(parts)
        return
    with pytest.raises(CheckpointError, match="is no checkpoint, and no stage's file in one"):
        require_name(parts)
