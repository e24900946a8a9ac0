"""Temporary folders, and their removal."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from rpcmp.process import resources


def test_sweep_does_not_follow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").touch()
    (tmp_path / "rpcmp-code-x").symlink_to(kept)
    resources.sweep("rpcmp-code-")
    assert (kept / "file").exists()


def test_a_folder_is_removed_at_any_depth_and_with_any_permissions() -> None:
    folder = resources.create_folder("rpcmp-test-")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 100):
        os.mkdir("deeper", dir_fd=here)
        below = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.mkdir("hidden", 0o000, dir_fd=here)
    os.symlink("/etc", "link", dir_fd=here)
    os.close(here)
    resources.remove_folder(folder)
    assert not folder.exists()
    assert Path("/etc/passwd").exists()
