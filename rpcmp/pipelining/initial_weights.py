"""Load weights to start from, `init`, under the names of the unsplit model.

Each stage reads only the tensors of its own layers; see `weight_files` for the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from safetensors import safe_open
from torch import Tensor, nn

from rpcmp.config.schema import Config
from rpcmp.config.types import COPY
from rpcmp.errors import ConfigError, one_line, some_of
from rpcmp.pipelining.weight_files import WeightFiles


class StoredNames:
    """The names in the files of `init` of the parameters and buffers of a model.

    Args:
        names: all that are in the files.
        tied_to: first names of tied parameters, whose other names may be missing.
        other_names: the stored name of what the files may have by other names.
        in_init: the names in the files of what is in them, by the model's; None: all is.
    """

    def __init__(
        self,
        names: Collection[str],
        tied_to: Mapping[str, str],
        other_names: Mapping[str, str] | None = None,
        in_init: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.names, self.tied_to = names, tied_to
        self._in_init = in_init
        self._under = {first: name for name, first in (other_names or {}).items() if name in names}

    @classmethod
    def of(cls, config: Config, files: WeightFiles) -> StoredNames:
        in_init = None if config.cut is None else config.cut.in_init
        return cls(files.names, config.tied_to, config.other_names, in_init)

    def first_of(self, name: str) -> str:
        return self.tied_to.get(name, name)

    def is_elsewhere(self, name: str) -> bool:
        """Return whether the files need not have it: it keeps its values."""
        return bool(self._in_init) and self.first_of(name) not in (self._in_init or {})

    def find(self, name: str) -> str | None:
        """Return the name in the files; None if they lack it."""
        first = self.first_of(name)
        plain = [first, name, self._under.get(first, "")]
        known = self._in_init[first] if self._in_init else plain
        return next((each for each in known if each in self.names), None)

    def needed(self, names: Iterable[str]) -> list[str]:
        """Return the names in the files of some parameters and buffers, of those that they have."""
        found = (self.find(name) for name in names if not self.is_elsewhere(name))
        return [name for name in found if name is not None]


def require_known_weights(
    files: WeightFiles, prefixes: Iterable[str], names: Collection[str] | None
) -> None:
    """Check that every tensor of `init` belongs to one of the model's layers.

    Args:
        names: all names of the model; None if not known yet.
    """
    prefixes = tuple(prefixes)
    stored = sorted(files.names)
    if names is None:
        unknown = [name for name in stored if not name.startswith(prefixes)]
    else:
        unknown = [name for name in stored if name not in names]
    if unknown:
        raise ConfigError(f"{files.what} has tensors of no layer: {some_of(unknown)}")


def load_weights(
    files: WeightFiles,
    modules: Mapping[str, tuple[str, nn.Module]],
    stored: StoredNames,
    owns_prefixes: bool,
) -> None:
    """Load the tensors of these layers from `init`.

    Args:
        modules: by the layers' names, with the prefix of their tensors.
        owns_prefixes: whether no other layer shares a prefix, so that an unknown name with it is a
            mistake.

    Raises:
        ConfigError: a tensor is missing, has another shape, or is unknown; names all of them.
    """
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    for layer, (prefix, module) in modules.items():  # one at a time: it is in memory twice
        own, state = module.state_dict(), dict[str, Tensor]()
        for name, value in own.items():
            whole = prefix + name
            if stored.is_elsewhere(whole):
                state[name] = value
                continue
            if (found := stored.find(whole)) is None:
                wrong["lacks"].append(stored.first_of(whole) if COPY in whole else whole)
                continue
            state[name] = read_tensor(files, found)
            if isinstance(value, Tensor) and state[name].shape != value.shape:
                shapes = f"{list(state[name].shape)}, not {list(value.shape)}"
                wrong["has another shape of"].append(f"{whole} ({shapes})")
        if owns_prefixes:
            of_layer = {prefix + name for name in own}
            unknown = {n for n in stored.names if n.startswith(prefix)} - of_layer
            wrong["has, for no layer,"] += sorted(unknown - {*stored.tied_to})
        if not any(wrong.values()):
            try:
                module.load_state_dict(state)
            except RuntimeError as error:  # of a module that loads in a way of its own
                raise ConfigError(f"{files.what}: layer {layer!r}: {error}") from error
    if problems := [f"{what} {some_of(these)}" for what, these in wrong.items() if these]:
        raise ConfigError(f"{files.what} does not fit the model: it {'; it '.join(problems)}")


def read_tensor(files: WeightFiles, name: str) -> Tensor:
    """Return one tensor; reads no others."""
    path = files.places[name]
    try:
        # Opened for each, because what was read counts as memory for as long as a file is open.
        file = safe_open(path, "pt")
    except Exception as error:  # of the library's own kind
        raise files.unreadable(path, error) from error
    with file:
        try:
            tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        except Exception as error:  # as above
            raise ConfigError(
                f"{files.what}: {path.name} has no {name!r}, or is damaged: {one_line(error)}"
            ) from error
    return tensor
