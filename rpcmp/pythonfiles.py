"""Which Python files belong to the code in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def python_files(folder: Path) -> Iterator[Path]:
    """Modules and packages: *.py, and folders with an __init__.py; nothing hidden.

    Raises:
        OSError: the folder cannot be read.
    """
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.suffix == ".py" and path.is_file():
            yield path
        elif path.is_dir() and (path / "__init__.py").is_file():
            yield from python_files(path)
