"""Grants of files and folders next to hidden entries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rpcmp.process.sandbox.landlock import Access, Grant, grants, private_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create the folders a and b with files, and a link from a to b."""
    for name in ("a/deep/file", "a/deep/key", "a/other", "b/file"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "a/link").symlink_to(tmp_path / "b")
    return tmp_path


def granted(tree: Path, *paths: str, hidden: Sequence[str] = ()) -> set[tuple[str, str]]:
    found = grants(
        [str(tree / path) for path in paths], Access.READ, [str(tree / path) for path in hidden]
    )
    return {(str(Path(grant.path).relative_to(tree)), grant.access.value) for grant in found}


def test_a_folder_without_hidden_entries_is_one_grant(tree: Path) -> None:
    assert granted(tree, "a") == {("a", "read")}
    assert granted(tree, "a", hidden=["b", "aa"]) == {("a", "read")}


def test_siblings_of_hidden_entries_are_granted_and_links_never(tree: Path) -> None:
    assert granted(tree, "a", hidden=["a/deep/key"]) == {
        ("a", "list"),
        ("a/deep", "list"),
        ("a/deep/file", "read"),
        ("a/other", "read"),
    }


def test_hidden_paths_are_never_granted_by_any_name(tree: Path) -> None:
    assert granted(tree, "a", hidden=["a"]) == set()
    assert granted(tree, "a/deep/file", hidden=["a"]) == set()
    assert granted(tree, "a/link", hidden=["b"]) == set()
    assert granted(tree, "b", hidden=["a/link"]) == set()
    assert granted(tree, "a/missing") == set()


def test_a_granted_link_grants_its_target(tree: Path) -> None:
    assert granted(tree, "a/link") == {("b", "read")}
    assert grants([str(tree / "b")], Access.WRITE, []) == [Grant(str(tree / "b"), Access.WRITE)]


def test_private_files_are_not_world_readable(tree: Path) -> None:
    (tree / "a/deep/key").chmod(0o640)
    (tree / "b").chmod(0o750)
    assert sorted(private_files(str(tree))) == [str(tree / "a/deep/key"), str(tree / "b")]
    assert private_files(str(tree), depth=2) == [str(tree / "b")]
