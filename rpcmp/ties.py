"""Parameters that are one and lie in several layers: which stages have them, and that they fit.

The first name owns the parameter: its stage adds up the gradients of all places, in the order of
the names, and its optimizer steps; the others take over what it has become. So there is one state
of an optimizer, one tensor in a checkpoint, and the bits do not depend on where the model is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rpcmp.errors import ConfigError
from rpcmp.suggestion import did_you_mean, nearest


def layer_of(parameter: str, layers: Sequence[str]) -> str:
    """The layer that a parameter belongs to.

    Raises:
        ConfigError: none.
    """
    found = [layer for layer in layers if parameter.startswith(f"{layer}.")]
    if not found:
        layer, _, rest = parameter.partition(".")
        near = nearest(layer, layers)
        hint = did_you_mean(near and f"{near}.{rest}")
        raise ConfigError(f"tied: {parameter!r} lies in no layer{hint}")
    return max(found, key=len)


def layer_of_any(parameter: str, layers: Sequence[str]) -> bool:
    """Whether a parameter belongs to one of these layers."""
    return any(parameter.startswith(f"{layer}.") for layer in layers)


def require_equal(tied: Sequence[Sequence[str]], kinds: Mapping[str, str]) -> None:
    """Check that what is tied exists and is alike.

    Args:
        tied: the config's.
        kinds: what the parameters are, in words, by their names.

    Raises:
        ConfigError: a name does not exist, or its parameter is of another kind than the first's.
    """
    for names in tied:
        for name in names:
            if name not in kinds:
                hint = did_you_mean(nearest(name, kinds))
                raise ConfigError(f"tied: there is no parameter {name!r}{hint}")
            if kinds[name] != kinds[names[0]]:
                raise ConfigError(
                    f"tied: {name!r} is {kinds[name]}, but {names[0]!r} is {kinds[names[0]]}"
                )
