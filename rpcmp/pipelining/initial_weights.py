"""Weights to start from, `init`: safetensors under the names of the unsplit model.

    init = "model.safetensors"          one file, as `rpcmp export` writes it
    init = "llama"                      a folder as transformers' `save_pretrained` writes it:
      model.safetensors.index.json        which tensor is in which file, if there are several
      model-00001-of-00003.safetensors    or model.safetensors alone

Each host has its copy, and reads only the bytes of the tensors of its own layers.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from safetensors import safe_open
from torch import Tensor, nn

from rpcmp.config.files import MIB, read_bytes
from rpcmp.config.types import COPY
from rpcmp.errors import MAX_LISTED, ConfigError, one_line

INDEX = "model.safetensors.index.json"

SINGLE = "model.safetensors"

MAX_INDEX = 64 * MIB
"""Bytes; an index has some 100 per tensor."""


class _Index(BaseModel):
    """Transformers' index; its `metadata` is not needed."""

    weight_map: dict[str, str] = Field(min_length=1)


class WeightFiles:
    """The tensors of a file or folder, which are read one by one.

    Args:
        path: of the file, of the folder, or of an index in it.

    Raises:
        ConfigError: it cannot be read, or has no weights. So do all methods.
    """

    def __init__(self, path: str) -> None:
        self._what = f"init = {path!r}"
        self._path = Path(path)

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def get(self, name: str) -> Tensor:
        """Return one tensor; reads no others."""
        path = self._places[name]
        # Opened for each, because what was read counts as memory for as long as a file is open.
        with self._opened(path) as file:
            try:
                tensor: Tensor = file.get_tensor(name)
            except Exception as error:  # of the library's own kind
                raise ConfigError(
                    f"{self._what}: {path.name} has no {name!r}, or is damaged: {one_line(error)}"
                ) from error
        return tensor

    @cached_property
    def _places(self) -> dict[str, Path]:
        """The file of each tensor, by name."""
        path = self._path
        if path.is_dir():
            found = [path / name for name in (INDEX, SINGLE) if os.path.lexists(path / name)]
            if not found:
                raise ConfigError(f"{self._what} is a folder without {SINGLE} or {INDEX}")
            path = found[0]
        if path.suffix == ".json":
            return self._indexed(path)
        with self._opened(path) as file:
            return dict.fromkeys(file.keys(), path)

    def _indexed(self, path: Path) -> dict[str, Path]:
        try:
            index = _Index.model_validate_json(read_bytes(path, MAX_INDEX))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._what}: {path.name}: {one_line(error)}") from error
        for file in sorted(set(index.weight_map.values())):
            if not file or Path(file).name != file or file == "..":
                raise ConfigError(
                    f"{self._what}: {path.name} names {file!r}, which is no file beside it"
                )
            if not os.path.lexists(path.parent / file):
                raise ConfigError(f"{self._what}: {file} is missing, which {path.name} names")
        return {name: path.parent / file for name, file in index.weight_map.items()}

    def _opened(self, path: Path) -> Any:
        try:
            return safe_open(path, "pt")
        except Exception as error:  # of the library's own kind
            file = "" if path == self._path else f" ({path.name})"
            text = f"{self._what}{file} cannot be read: {one_line(error)}"
            if path.is_symlink():
                text += f" ({path.name} is a link: its folder has to be in data.paths too)"
            raise ConfigError(text) from error


def require_known_weights(
    path: str, prefixes: Iterable[str], names: Collection[str] | None
) -> None:
    """Check that every tensor of `init` belongs to one of the model's layers.

    Args:
        names: all names of the model; None if not known yet.
    """
    prefixes = tuple(prefixes)
    stored = sorted(WeightFiles(path).names)
    if names is None:
        unknown = [name for name in stored if not name.startswith(prefixes)]
    else:
        unknown = [name for name in stored if name not in names]
    if unknown:
        raise ConfigError(f"init = {path!r} has tensors of no layer: {_listed(unknown)}")


def load_weights(
    path: str,
    modules: Mapping[str, tuple[str, nn.Module]],
    tied_to: Mapping[str, str],
    owns_prefixes: bool,
    other_names: Mapping[str, str] | None = None,
    in_init: Mapping[str, list[str]] | None = None,
) -> None:
    """Load the tensors of these layers from `init`.

    Args:
        modules: by the layers' names, with the prefix of their tensors.
        tied_to: first names of tied parameters, whose other names may be missing.
        owns_prefixes: whether no other layer shares a prefix, so that an unknown name with it is a
            mistake.
        other_names: the stored name of what the file may have by other names.
        in_init: the names in the file of what is in it; all else keeps its values.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is unknown; names all of them.
    """
    files = WeightFiles(path)
    names = files.names
    under = {first: name for name, first in (other_names or {}).items() if name in names}
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    for layer, (prefix, module) in modules.items():  # one at a time: it is in memory twice
        own, state = module.state_dict(), dict[str, Tensor]()
        for name, value in own.items():
            whole = prefix + name
            first = tied_to.get(whole, whole)
            if in_init and first not in in_init:
                state[name] = value
                continue
            known = in_init[first] if in_init else [first, whole, under.get(first, "")]
            stored = next((each for each in known if each in names), None)
            if stored is None:
                wrong["lacks"].append(first if COPY in whole else whole)
                continue
            state[name] = files.get(stored)
            if isinstance(value, Tensor) and state[name].shape != value.shape:
                shapes = f"{list(state[name].shape)}, not {list(value.shape)}"
                wrong["has another shape of"].append(f"{whole} ({shapes})")
        if owns_prefixes:
            of_layer = {prefix + name for name in own}
            unknown = {n for n in names if n.startswith(prefix)} - of_layer - {*tied_to}
            wrong["has, for no layer,"] += sorted(unknown)
        if not any(wrong.values()):
            try:
                module.load_state_dict(state)
            except RuntimeError as error:  # of a module that loads in a way of its own
                raise ConfigError(f"init = {path!r}: layer {layer!r}: {error}") from error
    if problems := [f"{what} {_listed(these)}" for what, these in wrong.items() if these]:
        raise ConfigError(f"init = {path!r} does not fit the model: it {'; it '.join(problems)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED])
    return f"{shown} and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else shown
