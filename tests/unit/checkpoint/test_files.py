"""The path of a checkpoint gives a job access to nothing outside of its folder."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.checkpoint import files
from rpcmp.checkpoint.files import Inside, beneath, place_of
from rpcmp.checkpoint.folder import remove
from rpcmp.errors import CheckpointError
from tests.support.examples import examples


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
        patch.setattr(os, "fsync", lambda fd: None)  # thousands would take minutes
        yield base


NAMES = (
    *("..", ".", "", "/", "out", "up", "circle", "proc", "fifo", "canary", "step-00000001", "link"),
    *("step-00000002", "a.safetensors", "root", "job", "\0", "x" * 300, "~", "é"),
)
PIECES = st.one_of(st.sampled_from(NAMES), st.text(st.characters(codec="utf-8"), max_size=5))


def require_harmless(tree: Path, start: int, pieces: Sequence[str]) -> None:
    """Check that reading, checking, writing and removing this path affect nothing outside."""
    folder = beneath(tree / "root", str(tree / "root" / "job"))
    head = ["", "/", f"{folder}/", str(tree)][start]
    try:
        place = folder.at(head + "/".join(pieces))
    except CheckpointError:
        return
    try:
        assert files.check(place, "0" * 64, 6) in ("missing", "damaged")
        assert files.check(place, hashlib.sha256(b"SECRET").hexdigest(), 6) != "ok"
    except OSError:
        pass
    for change in (lambda: files.write_durably(place / "new", [b"evil"]), lambda: remove(place)):
        try:
            change()
        except (OSError, CheckpointError):
            continue
    (tree / "root" / "job" / "step-00000002").mkdir(exist_ok=True)
    for outside in (tree / "canary", tree / "step-00000001" / "canary"):
        assert outside.read_bytes() == b"SECRET"
    assert sorted(path.name for path in tree.iterdir()) == ["canary", "root", "step-00000001"]
    assert [path.name for path in (tree / "step-00000001").iterdir()] == ["canary"]


@pytest.mark.parametrize("start", range(4))
def test_no_path_of_two_steps_leads_elsewhere(tree: Path, start: int) -> None:
    for pieces in itertools.chain(
        itertools.product(NAMES, repeat=1), itertools.product(NAMES, repeat=2)
    ):
        require_harmless(tree, start, pieces)


@examples(300, derandomize=False)
@given(start=st.integers(0, 3), pieces=st.lists(PIECES, max_size=6))
def test_no_longer_path_leads_elsewhere(tree: Path, start: int, pieces: list[str]) -> None:
    require_harmless(tree, start, pieces)


@pytest.mark.parametrize(
    "folder", ["/", "/etc", "relative", "/roots", "/root/../x", "\0", "/root/.."]
)
def test_a_folder_outside_the_root_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "root").mkdir()
    given = folder if folder in ("/", "/etc", "relative", "\0") else f"{tmp_path}{folder}"
    with pytest.raises(CheckpointError):
        beneath(tmp_path / "root", given)


def test_a_job_may_have_its_folder_elsewhere_on_a_host_without_the_drivers_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, driver = tmp_path / "server" / "checkpoints", "/home/other/checkpoints"
    root.mkdir(parents=True)
    others = [tmp_path / "elsewhere", root.parent, root]
    place = place_of(root, driver, "checkpoints", others)
    assert place.real == root
    # Messages name it and its files by the driver's path.
    assert place.at(f"{driver}/step/a").real == root / "step" / "a"
    files.write_durably(place / "step", [b"ours"])
    assert (root / "step").read_bytes() == b"ours"
    assert str(place / "step") == str(root / "step")  # but a person is told where it is
    assert place_of(root, str(root / "own"), "checkpoints", others).real == root / "own"
    monkeypatch.chdir(root.parent)
    assert place_of(root, driver, "checkpoints").real == root
    with pytest.raises(CheckpointError):
        place_of(root, driver, "")


def test_a_folder_of_which_no_place_is_allowed_is_refused_by_the_drivers_path(
    tmp_path: Path,
) -> None:
    with pytest.raises(CheckpointError, match=r"^'/home/other' is neither"):
        place_of(tmp_path, "/home/other", "../x", [tmp_path])
    with pytest.raises(CheckpointError, match=r"^'/home/other' is neither"):
        place_of(tmp_path, "/home/other", "\0", [tmp_path])


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
