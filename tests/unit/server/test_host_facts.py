"""Facts about a host: its folder for checkpoints, and its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp.config.files import sha256_of
from rpcmp.server.host_facts import (
    marked,
    try_folder,
)


def test_try_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    found = try_folder(tmp_path / "a" / "b")
    assert (found.problem, found.has_marker) == ("", False)
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    with marked(tmp_path) as marker:
        assert try_folder(tmp_path, marker).has_marker
    (tmp_path / "file").write_text("")
    assert try_folder(tmp_path / "file" / "b").problem == "Not a directory"


def test_the_hash_of_a_package_covers_its_subpackages_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "rpcmp_test_package"
    (package / "inner").mkdir(parents=True)
    for made in (package, package / "inner"):
        (made / "__init__.py").write_text("")
    (package / "inner" / "deep.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    first = sha256_of(package.name)
    (package / "inner" / "deep.py").write_text("x = 2\n")
    assert sha256_of(package.name) != first
    (package / "inner" / "deep.py").write_text("x = 1\n")
    for name in ("notes", ".ipynb_checkpoints"):  # folders that a job does not send
        (package / name).mkdir()
        (package / name / "deep.py").write_text("x = 3\n")
    assert sha256_of(package.name) == first
    with pytest.raises(ImportError, match="no module 'rpcmp_no_such_package'"):
        sha256_of("rpcmp_no_such_package")
