"""What is granted of files and folders, and what is hidden beneath them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rpcmp.process.sandbox.landlock import Access, Grant, grants, private_files


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Folders a and b, a file in each, and a link from a to b."""
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


def test_a_folder_with_nothing_hidden_is_granted_as_one(tree: Path) -> None:
    assert granted(tree, "a") == {("a", "read")}
    assert granted(tree, "a", hidden=["b", "aa"]) == {("a", "read")}


def test_siblings_of_what_is_hidden_are_granted_one_by_one_and_links_never(tree: Path) -> None:
    assert granted(tree, "a", hidden=["a/deep/key"]) == {
        ("a", "list"),
        ("a/deep", "list"),
        ("a/deep/file", "read"),
        ("a/other", "read"),
    }


def test_nothing_is_granted_of_what_is_hidden_by_whatever_name(tree: Path) -> None:
    assert granted(tree, "a", hidden=["a"]) == set()
    assert granted(tree, "a/deep/file", hidden=["a"]) == set()
    assert granted(tree, "a/link", hidden=["b"]) == set()
    assert granted(tree, "b", hidden=["a/link"]) == set()
    assert granted(tree, "a/missing") == set()


def test_the_links_own_target_is_granted_where_a_link_is(tree: Path) -> None:
    assert granted(tree, "a/link") == {("b", "read")}
    assert grants([str(tree / "b")], Access.WRITE, []) == [Grant(str(tree / "b"), Access.WRITE)]


def test_what_not_everybody_may_read_is_private(tree: Path) -> None:
    (tree / "a/deep/key").chmod(0o640)
    (tree / "b").chmod(0o750)
    assert sorted(private_files(str(tree))) == [str(tree / "a/deep/key"), str(tree / "b")]
    assert private_files(str(tree), depth=2) == [str(tree / "b")]
