"""Which code a module name stands for on this host, and what else a job has brought in here."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

from rpcmp.pythonfiles import python_files

COMPARED_BY_VERSION = ("torch",)
"""Packages whose files need not be read: a release of theirs is always the same."""

_RELEASES = {*COMPARED_BY_VERSION, *sys.stdlib_module_names}
"""Packages of which a host's release is compared when it is asked to take part in a job."""


def sha256_of(module: str) -> str:
    """The hash of all Python files of a top-level module or package; without those in archives.

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
    for folder in filter(Path.is_dir, folders):  # it may be an archive
        for path in python_files(folder):
            _add(digest, path.relative_to(folder).as_posix(), path)
    if not folders and spec.origin and Path(spec.origin).exists():
        _add(digest, Path(spec.origin).name, Path(spec.origin))
    return digest.hexdigest()


def of_job(named: Iterable[str]) -> dict[str, str]:
    """What this process computes with, by what it is: "the code of 'my_model'" and its hash.

    That is all of the modules that the job names, and the user's other ones that these have
    imported by now: those that lie in the same folders. Of installed packages that either of them
    uses it is the version.

    Args:
        named: modules, which can be imported here.

    Raises:
        OSError: a file cannot be read.
        ImportError: there is no such module.
    """
    loaded = {name: module for name, module in list(sys.modules.items()) if "." not in name}
    own = {_top(name) for name in named} - _RELEASES
    folders = {folder for name in own for folder in _folders(importlib.util.find_spec(name))}
    folders = {folder for folder in folders if not _is_for_packages(folder)}
    own |= {
        name
        for name, module in loaded.items()
        if name not in {"rpcmp", *_RELEASES}
        and folders & _folders(getattr(module, "__spec__", None))
    }
    versions = {
        name: getattr(loaded.get(name), "__version__", None)
        for name in _used_by(own - {"rpcmp"}) - own - {"rpcmp", *_RELEASES}
    }
    return {
        **{f"the code of {name!r}": sha256_of(name)[:12] for name in sorted(own)},
        **{
            f"the version of {name!r}": version
            for name, version in sorted(versions.items())
            if isinstance(version, str)
        },
    }


def _top(module: str) -> str:
    return module.partition(".")[0]


def _folders(spec: ModuleSpec | None) -> set[Path]:
    """Where a top-level module of Python files was found."""
    if spec is None:
        return set()
    places = list(spec.submodule_search_locations or ())
    if not places and spec.has_location and spec.origin and spec.origin.endswith(".py"):
        places = [spec.origin]
    return {Path(place).parent for place in places}


def _is_for_packages(folder: Path) -> bool:
    """Whether what lies beside a module there has nothing to do with it."""
    is_known = folder.name in ("site-packages", "dist-packages")
    return is_known or any(folder.glob("*.dist-info"))


def _used_by(packages: set[str]) -> set[str]:
    """The packages whose modules, functions and classes the modules of `packages` have names for.

    What these packages themselves need is not looked for: their versions stand for it.
    """
    modules = [module for name, module in list(sys.modules.items()) if _top(name) in packages]
    values = [
        value for module in modules for value in list(getattr(module, "__dict__", {}).values())
    ]
    names = [value.__name__ for value in values if isinstance(value, ModuleType)]
    kinds = (type, FunctionType, BuiltinFunctionType)
    names += [value.__module__ for value in values if isinstance(value, kinds) and value.__module__]
    return {_top(name) for name in names if isinstance(name, str)}


def _add(digest: hashlib._Hash, name: str, path: Path) -> None:
    content = path.read_bytes()
    digest.update(f"{name}\0{len(content)}\0".encode())
    digest.update(content)
