"""An excerpt of the files of `init`: what a stage needs of them, as one safetensors file.

It is made while it is sent, so that nobody needs the disk or the memory for it; see
`job.weight_transfer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rpcmp.checkpoint.safetensors_header import Header, TensorRange, aligned, blocks, read_ranges
from rpcmp.config.files import open_regular
from rpcmp.errors import CheckpointError, ConfigError
from rpcmp.pipelining.weight_files import WeightFiles


class Excerpt:
    """A safetensors file of some of the tensors, which nobody has written.

    Attributes:
        config: the file `CONFIG` that belongs to it; empty if there is none.
        size: its bytes.
        key: changes with what is in both, unless a file's time was set back.
    """

    def __init__(self, files: WeightFiles, names: Iterable[str]) -> None:
        self._files, self.config = files, files.config()
        wanted = sorted(set(names))
        if missing := [name for name in wanted if name not in files.places]:
            raise ConfigError(f"{files.what} has no {missing[0]!r} any more")
        paths = {name: files.places[name] for name in wanted}
        of_files = {path: self._ranges_in(path) for path in set(paths.values())}
        for name, path in paths.items():
            if name not in of_files[path]:
                raise ConfigError(f"{files.what}: {path.name} has no {name!r}")
        ranges = aligned({name: of_files[path][name] for name, path in paths.items()})
        self._parts = [(paths[name], place) for name, place in ranges.items()]
        header = Header(ranges)
        self._header = header.encode({})
        self.size = len(self._header) + header.data_size
        self.key = self._digest()

    def blocks(self) -> Iterator[bytes]:
        """Yield its bytes, in blocks that a message can carry."""
        yield self._header
        for path, place in self._parts:
            try:
                with open_regular(path) as file:
                    yield from blocks(file, place, path)
            except (OSError, ValueError, CheckpointError) as error:
                raise self._files.unreadable(path, error) from error

    def _ranges_in(self, path: Path) -> dict[str, TensorRange]:
        try:
            with open_regular(path) as file:
                return read_ranges(file, path.name)
        except (OSError, ValueError, CheckpointError) as error:
            raise self._files.unreadable(path, error) from error

    def _digest(self) -> str:
        digest = hashlib.sha256(self._header + self.config)
        for path in sorted({path for path, _ in self._parts}):
            status = path.stat()
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        return digest.hexdigest()
