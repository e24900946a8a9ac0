"""The weights that a run starts from, where its config names a file: `init = "model.safetensors"`.

The file holds the unsplit model's state_dict, as `rpcmp export` writes it. Each host reads the
tensors of its own layers and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from rpcmp.errors import ConfigError


def require_known(path: str, layers: Iterable[str]) -> None:
    """Check that every tensor of the file belongs to one of the model's layers.

    Raises:
        ConfigError: one does not, or the file cannot be read.
    """
    prefixes = tuple(f"{layer}." for layer in layers)
    with _open(path) as file:
        unknown = sorted(name for name in file.keys() if not name.startswith(prefixes))  # noqa: SIM118
    if unknown:
        raise ConfigError(f"init = {path!r} has tensors of no layer: {', '.join(unknown[:5])}")


def load(path: str, modules: Mapping[str, nn.Module], tied_to: Mapping[str, str]) -> None:
    """Give these layers their tensors from the file.

    Args:
        path: of the file.
        modules: by the layers' names.
        tied_to: for parameters that the file need not have the names of those that they are.

    Raises:
        ConfigError: one is missing or of another shape, or the file cannot be read.
    """
    with _open(path) as file:
        names = set(file.keys())
        for layer, module in modules.items():
            try:
                module.load_state_dict(_own(file, names, f"{layer}.", tied_to))
            except RuntimeError as error:
                raise ConfigError(f"init = {path!r}: layer {layer!r}: {error}") from error


def _own(file: Any, names: set[str], prefix: str, tied_to: Mapping[str, str]) -> dict[str, Tensor]:
    stored = {name: name for name in names}
    stored |= {name: first for name, first in tied_to.items() if first in names}
    return {
        name.removeprefix(prefix): file.get_tensor(stored[name])
        for name in sorted(stored)
        if name.startswith(prefix)
    }


def _open(path: str) -> Any:
    try:
        return safe_open(path, "pt")
    except Exception as error:  # of the library's own kind
        raise ConfigError(f"init = {path!r} cannot be read: {error}") from error
