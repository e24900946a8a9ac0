"""The weights that a run starts from, where its config names a file: `init = "model.safetensors"`.

The file holds the unsplit model's state_dict, as `rpcmp export` writes it. Each host reads the
tensors of its own layers and no others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from rpcmp.errors import ConfigError

NAMED = 5
"""Tensors that a message names."""


def require_known(path: str, prefixes: Iterable[str], names: Collection[str] | None) -> None:
    """Check that every tensor of the file belongs to one of the model's layers.

    Args:
        path: of the file.
        prefixes: what the names of each layer begin with.
        names: all that the model has; None: nobody knows yet.

    Raises:
        ConfigError: one does not, or the file cannot be read.
    """
    begins = tuple(prefixes)
    with _open(path) as file:
        every = sorted(file.keys())
    unknown = [
        name for name in every if not (name.startswith(begins) if names is None else name in names)
    ]
    if unknown:
        raise ConfigError(f"init = {path!r} has tensors of no layer: {', '.join(unknown[:NAMED])}")


def load(
    path: str,
    modules: Mapping[str, tuple[str, nn.Module]],
    tied_to: Mapping[str, str],
    owns_prefixes: bool,
) -> None:
    """Give these layers their tensors from the file.

    Args:
        path: of the file.
        modules: by the layers' names, with what the names of their tensors begin with.
        tied_to: for parameters that the file need not have the names of those that they are.
        owns_prefixes: whether nobody else's names begin as a layer's do, so that a name which it
            does not have is a mistake.

    Raises:
        ConfigError: one is missing, unknown or of another shape, or the file cannot be read.
    """
    with _open(path) as file:
        names = set(file.keys())
        for layer, (prefix, module) in modules.items():
            try:
                own = {name: prefix + name for name in module.state_dict()}
                module.load_state_dict(_own(file, names, own, tied_to))
                found = {name for name in names if name.startswith(prefix)} if owns_prefixes else ()
                if unknown := sorted({*found} - {*own.values()} - {*tied_to}):
                    raise RuntimeError(f"has no {', '.join(unknown[:NAMED])}")
            except RuntimeError as error:
                raise ConfigError(f"init = {path!r}: layer {layer!r}: {error}") from error


def _own(
    file: Any, names: set[str], own: Mapping[str, str], tied_to: Mapping[str, str]
) -> dict[str, Tensor]:
    """A module's tensors: of each the file's, under its name or that which it is tied to."""
    stored = {name: tied_to.get(whole, whole) for name, whole in own.items()}
    stored |= {name: own[name] for name, whole in stored.items() if whole not in names}
    return {name: file.get_tensor(whole) for name, whole in stored.items() if whole in names}


def _open(path: str) -> Any:
    try:
        return safe_open(path, "pt")
    except Exception as error:  # of the library's own kind
        raise ConfigError(f"init = {path!r} cannot be read: {error}") from error
