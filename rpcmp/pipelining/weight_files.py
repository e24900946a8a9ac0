"""The files of `init`: weights under the names of the unsplit model. No torch here.

    init = "model.safetensors"          one file, as `rpcmp export` writes it
    init = "llama"                      a folder as transformers' `save_pretrained` writes it:
      model.safetensors.index.json        which tensor is in which file, if there are several
      model-00001-of-00003.safetensors    or model.safetensors alone
      config.json                         what to build the model from

A host that has a copy reads only the bytes of the tensors of its own layers. To one that has none,
the driver sends an excerpt, see `job.weight_transfer`.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, Field
from safetensors import safe_open

from rpcmp.config.files import MIB, leads_out, read_bytes
from rpcmp.errors import ConfigError, one_line

INDEX = "model.safetensors.index.json"

SINGLE = "model.safetensors"

CONFIG = "config.json"
"""What transformers and others keep beside the weights, to build the model from."""

MAX_CONFIG = MIB

MAX_INDEX = 64 * MIB
"""Bytes; an index has some 100 per tensor."""


class _Index(BaseModel):
    """Transformers' index; its `metadata` is not needed."""

    weight_map: dict[str, str] = Field(min_length=1)


class WeightFiles:
    """The tensors of a file or folder.

    Args:
        path: of the file, of the folder, or of an index in it.

    Raises:
        ConfigError: it cannot be read, or has no weights. So do all methods.
    """

    def __init__(self, path: str) -> None:
        self.what = f"init = {path!r}"
        self._path = Path(path)

    @property
    def names(self) -> set[str]:
        return set(self.places)

    @cached_property
    def places(self) -> dict[str, Path]:
        """The file of each tensor, by name."""
        path = self._path
        if path.is_dir():
            found = [path / name for name in (INDEX, SINGLE) if os.path.lexists(path / name)]
            if not found:
                raise ConfigError(f"{self.what} is a folder without {SINGLE} or {INDEX}")
            path = found[0]
        if path.suffix == ".json":
            return self._indexed(path)
        try:
            with safe_open(path, "np") as file:
                return dict.fromkeys(file.keys(), path)
        except Exception as error:  # of the library's own kind
            raise self.unreadable(path, error) from error

    def config(self) -> bytes:
        """Return the file `CONFIG` of a folder; empty if there is none."""
        path = self._path / CONFIG
        if not os.path.lexists(path):
            return b""
        # The hub's cache has links to its own blobs; any other may lead to what is secret.
        blobs = self._path.parent.parent / "blobs"
        is_cache = self._path.parent.name == "snapshots" and not blobs.is_symlink()
        folders = [self._path, blobs] if is_cache else [self._path]
        if (target := leads_out(path, *folders)) is not None:
            raise ConfigError(f"{self.what}: {path.name} leads to {target}: copy that file")
        try:
            return read_bytes(path, MAX_CONFIG)
        except (OSError, ValueError) as error:
            raise self.unreadable(path, error) from error

    def unreadable(self, path: Path, error: Exception) -> ConfigError:
        """Return the error for one of the files."""
        file = "" if path == self._path else f" ({path.name})"
        text = f"{self.what}{file} cannot be read: {one_line(error)}"
        if path.is_symlink():
            text += f" ({path.name} is a link: its folder has to be in data.paths too)"
        return ConfigError(text)

    def _indexed(self, path: Path) -> dict[str, Path]:
        try:
            index = _Index.model_validate_json(read_bytes(path, MAX_INDEX))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.what}: {path.name}: {one_line(error)}") from error
        for file in sorted(set(index.weight_map.values())):
            if not file or Path(file).name != file or file == "..":
                raise ConfigError(
                    f"{self.what}: {path.name} names {file!r}, which is no file beside it"
                )
            if not os.path.lexists(path.parent / file):
                raise ConfigError(f"{self.what}: {file} is missing, which {path.name} names")
        return {name: path.parent / file for name, file in index.weight_map.items()}
