"""Parameters that are one and lie in several layers: which stages have them, and that they fit.

The first name owns the parameter: its stage adds up the gradients of all places, in the order of
the names, and its optimizer steps; the others take over what it has become. So there is one state
of an optimizer, one tensor in a checkpoint, and the bits do not depend on where the model is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.suggestion import what_there_is


def require_equal(tied: Sequence[Sequence[str]], kinds: Mapping[str, str]) -> None:
    """Check that what is tied exists and is alike.

    Args:
        tied: the config's.
        kinds: what the parameters are, in words, by their names.

    Raises:
        ConfigError: a name does not exist, or its parameter is of another kind than the first's.
    """
    for group in tied:
        for name in group:
            if name not in kinds:
                raise ConfigError(
                    f"tied: there is no parameter {name!r}{what_there_is(name, kinds)}"
                )
            if kinds[name] != kinds[group[0]]:
                raise ConfigError(
                    f"tied: {name!r} is {kinds[name]}, but {group[0]!r} is {kinds[group[0]]}"
                )


def under_all_names(state: Mapping[str, Tensor], tied_to: Mapping[str, str]) -> dict[str, Tensor]:
    """A state_dict as the unsplit model has it: what is tied stands under each of its names."""
    return {**state, **{name: state[first] for name, first in tied_to.items()}}
