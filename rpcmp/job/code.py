"""The user's Python files that a job brings along to its stage servers."""

from __future__ import annotations

from pathlib import Path

from rpcmp.config.user_code import python_files
from rpcmp.errors import ConfigError
from rpcmp.v1 import control_pb2 as pb

MAX_FILES = 500
MAX_BYTES = 8 * 2**20


def collect(folder: Path) -> list[pb.CodeFile]:
    """The modules and packages beside a config: *.py, and folders that hold an __init__.py.

    Raises:
        ConfigError: there is more of it than belongs to a model.
    """
    files: list[pb.CodeFile] = []
    size = 0
    for path in python_files(folder):
        files.append(pb.CodeFile(path=path.relative_to(folder).as_posix(), content=_read(path)))
        size += len(files[-1].content)
        if len(files) > MAX_FILES or size > MAX_BYTES:
            raise ConfigError(
                f"{folder} holds more than {MAX_FILES} Python files or {MAX_BYTES // 2**20} MiB of "
                "them; put the config into a folder of its own, or install the model's package on "
                "every host and set ship_code = false"
            )
    return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
