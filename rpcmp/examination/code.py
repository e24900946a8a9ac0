"""Which code a module name stands for on this host."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from rpcmp.pythonfiles import python_files

COMPARED_BY_VERSION = ("torch",)
"""Packages whose files need not be read: a release of theirs is always the same."""


def sha256_of(module: str) -> str:
    """The hash of all Python files of a top-level module or package.

    Of a package all, since what a job names imports from the rest of it: the files that a job
    would send along, where it does.

    Raises:
        OSError: a file cannot be read.
        ImportError: there is no such module.
    """
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ImportError(f"there is no module {module!r}")
    digest = hashlib.sha256()
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in folders:
        for path in python_files(folder):
            _add(digest, path.relative_to(folder).as_posix(), path)
    if not folders and spec.origin and Path(spec.origin).exists():
        _add(digest, Path(spec.origin).name, Path(spec.origin))
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, path: Path) -> None:
    content = path.read_bytes()
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)
