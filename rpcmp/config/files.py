"""Read files of unknown origin, and identify the user's code.

Files are read without waiting, and up to a limit of memory. Code is identified by hashes of its
Python files, or by the version of an installed package.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import BinaryIO

MIB = 2**20


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raises ValueError for pipes and devices, without waiting."""
    file = open(  # noqa: SIM115 - the caller closes it
        path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
    )
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ValueError("it is not a regular file")


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is longer, or not a regular file.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it is longer than {limit // MIB} MiB")
    return data


def python_files(folder: Path, named: Iterable[str] = ()) -> Iterator[Path]:
    """Yield the files of modules and packages in a folder, except hidden ones.

    Args:
        named: modules that are used besides those that these import: a folder without `__init__.py`
            is a package only if somebody imports it.
    """
    imported = {name.partition(".")[0] for name in named}
    others: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.suffix == ".py" and path.is_file():
            yield path
            imported |= _imported_by(path)
        elif path.is_dir() and (path / "__init__.py").is_file():
            for inner in python_files(path):
                yield inner
                imported |= _imported_by(inner)
        elif path.is_dir():
            others[path.name] = path
    while found := sorted(imported & others.keys()):
        for inner in python_files(others.pop(found[0])):
            yield inner
            imported |= _imported_by(inner)


def leads_out(path: Path, *folders: Path | str) -> Path | None:
    """Return where a path leads to if that is in none of some folders, by a link; else None."""
    there = path.resolve()
    is_within = any(there.is_relative_to(Path(folder).resolve()) for folder in folders)
    return None if is_within else there


_IMPORT = re.compile(rb"^\s*(?:from|import)\s+([A-Za-z_]\w*)", re.MULTILINE)


def _imported_by(path: Path) -> set[str]:
    """Return the first names of the modules that a file imports, as far as lines begin so."""
    try:
        return {name.decode() for name in _IMPORT.findall(path.read_bytes())}
    except OSError:  # whoever reads it next says so
        return set()


COMPARED_BY_VERSION = ("torch",)
"""Packages whose files need not be read, since their releases do not differ."""

_RELEASES = {*COMPARED_BY_VERSION, *sys.stdlib_module_names}
"""Packages whose versions are compared when a host joins a job."""


def sha256_of(module: str) -> str:
    """Return the hash of all Python files of a top-level module or package, except in archives.

    All files of a package count, since the modules that a job names import from the rest of it.
    """
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ImportError(f"there is no module {module!r}")
    digest = hashlib.sha256()
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for folder in filter(Path.is_dir, folders):  # it may be an archive
        for path in python_files(folder):
            add_file(digest, path.relative_to(folder).as_posix(), path)
    if not folders and spec.origin and Path(spec.origin).exists():
        add_file(digest, Path(spec.origin).name, Path(spec.origin))
    return digest.hexdigest()


def code_versions(named: Iterable[str]) -> dict[str, str]:
    """Return the code that this process uses, such as "the code of 'my_model'" and its hash.

    These are the modules `named` by the job, and the user's modules in the same folders that have
    been imported so far. Installed packages among them, or used by them, are identified by their
    version: their files differ between builds.
    """
    loaded = {name: module for name, module in list(sys.modules.items()) if "." not in name}
    given = {name: _folders(importlib.util.find_spec(name)) for name in _tops(named)}
    releases = {name: _release(name) for name in given if any(map(_is_shared, given[name]))}
    folders = {folder for places in given.values() for folder in places if not _is_shared(folder)}
    own = {name for name in given if releases.get(name) is None} | {
        name
        for name in _tops(loaded)
        if name != "rpcmp" and folders & _folders(getattr(loaded[name], "__spec__", None))
    }
    releases |= {name: _release(name) for name in _used_by(own - {"rpcmp"}) - own}
    return {
        **{f"the code of {name!r}": sha256_of(name)[:12] for name in sorted(own)},
        **{
            f"the version of {name!r}": version
            for name, version in sorted(releases.items())
            if version is not None and name != "rpcmp"
        },
    }


def _tops(modules: Iterable[str]) -> set[str]:
    """Return the top-level packages, except those whose versions are compared anyway."""
    return {name.partition(".")[0] for name in modules} - _RELEASES


def _release(package: str) -> str | None:
    """Return a version without its build, "0.20.1" for "0.20.1+cpu"; None if unknown."""
    # Not `getattr`: a module that computes it, such as click's, may warn.
    version = getattr(sys.modules.get(package), "__dict__", {}).get("__version__")
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = version or metadata.version(package)
    return version.partition("+")[0] if isinstance(version, str) else None


def _folders(spec: ModuleSpec | None) -> set[Path]:
    if spec is None:
        return set()
    places = list(spec.submodule_search_locations or ())
    if not places and spec.has_location and spec.origin and spec.origin.endswith(".py"):
        places = [spec.origin]
    return {Path(place).parent for place in places}


def _is_shared(folder: Path) -> bool:
    """Return whether a folder holds unrelated packages, as site-packages does."""
    is_known = folder.name in ("site-packages", "dist-packages")
    return is_known or any(folder.glob("*.dist-info"))


def _used_by(packages: set[str]) -> set[str]:
    """Return the packages whose modules, functions and classes the modules of `packages` use.

    Their own dependencies are left out: their versions stand for these.
    """
    names = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            for value in list(getattr(module, "__dict__", {}).values()):
                kind = type(value)  # `__class__` may be a property of the user's
                if issubclass(kind, ModuleType):
                    names.append(value.__name__)
                elif issubclass(kind, type | FunctionType | BuiltinFunctionType):
                    names.append(value.__module__)
    return _tops(name for name in names if name and isinstance(name, str))


def add_file(digest: hashlib._Hash, name: str, path: Path) -> None:
    """Add a file to a hash; raises OSError before it adds anything."""
    content = path.read_bytes()
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)
