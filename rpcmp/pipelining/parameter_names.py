"""Find the layer that each name of the unsplit model belongs to, and check tied parameters.

A parameter is named by its layer and its name in it, `block3.attention.weight`; in a stage of
`[[stages]]` by the stage's `prefix`. Prefixes may be equal or empty if the unsplit model's own
attributes lie in several stages; then only the modules show which stage has a name. So they are
built on the meta device, where tensors have shapes but no memory. Modules that need their host are
checked after the stages have been built.

The first name of a tied parameter owns it: its stage adds up the gradients of all names, in their
order, and steps its optimizer; the other stages copy the result. So there is one optimizer state
and one tensor in a checkpoint, and the bits do not depend on where the model is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rpcmp.config.schema import Config
from rpcmp.errors import MAX_LISTED, ConfigError, did_you_mean, nearest, one_line, suggest
from rpcmp.pipelining import layers

_log = logging.getLogger(__name__)


class Named(NamedTuple):
    """The parameters of a layer, by their names in the unsplit model.

    Attributes:
        parameters: dtype and shape, such as "torch.float32 of shape (3, 4)".
        trained: names of those that are not frozen.
        state: names in its state_dict.
        shapes: of the parameters.
    """

    parameters: dict[str, str]
    trained: set[str]
    state: list[str]
    shapes: dict[str, tuple[int, ...]]


def named_parameters_of(
    config: Config, layers_of_stages: Sequence[Sequence[str]]
) -> dict[str, Named] | None:
    """Return the names of every layer; None if one cannot be built on the meta device here."""
    known: dict[str, Named] = {}
    try:
        for index, names in enumerate(layers_of_stages):
            with torch.device("meta"):
                built = layers.build_layers(config, index, names, loads=False)
            for layer, module in built.items():
                known[layer] = _named(module, config.prefix_of(layer), config.stage(index).frozen)
    except Exception as error:  # it needs its host, or says there what is wrong with it
        _log.debug(
            "stage %r cannot be built on the meta device here, so names of parameters are checked "
            "when all stages have been built: %s",
            config.stage_names[index],
            one_line(error),
        )
        return None
    require_distinct({layer: named.state for layer, named in known.items()})
    return known


def _named(module: nn.Module, prefix: str, frozen: bool) -> Named:
    parameters = dict(module.named_parameters(prefix.removesuffix(".")))
    return Named(
        {
            name: f"{value.dtype} of shape {tuple(value.shape)}"
            for name, value in parameters.items()
        },
        {name for name, value in parameters.items() if value.requires_grad and not frozen},
        [prefix + name for name in module.state_dict()],
        {name: tuple(value.shape) for name, value in parameters.items()},
    )


def require_distinct(names: Mapping[str, Iterable[str]]) -> None:
    """Raise ConfigError if two layers, or stages, have the same name in the unsplit model."""
    owners: dict[str, str] = {}
    for owner, its in names.items():
        for name in its:
            if owners.setdefault(name, owner) != owner:
                raise ConfigError(
                    f"{owners[name]!r} and {owner!r} both have {name!r} in the unsplit model: give "
                    "one of the stages another `prefix`, or let their modules name it otherwise"
                )


def layer_of(config: Config, parameter: str, names_of: Mapping[str, Named | None]) -> str:
    """Return the layer that a parameter belongs to.

    Args:
        names_of: the names of each layer; None if unknown: then its prefix decides.
    """
    for layer, named in names_of.items():
        if named is not None and parameter in named.parameters:
            return layer
    known = [name for named in names_of.values() if named for name in named.parameters]
    if known:
        raise ConfigError(f"tied: there is no parameter {parameter!r}{suggest(parameter, known)}")
    prefixes = {layer: config.prefix_of(layer) for layer in names_of}
    fitting = [layer for layer, prefix in prefixes.items() if parameter.startswith(prefix)]
    if not fitting:
        first, _, rest = parameter.partition(".")
        near = nearest(first, names_of)
        there_are = ", ".join(map(repr, list(names_of)[:MAX_LISTED]))
        raise ConfigError(
            f"tied: {parameter!r} lies in no layer{did_you_mean(near and f'{near}.{rest}')} (the "
            f"layers are {there_are}{', ...' if len(names_of) > MAX_LISTED else ''})"
        )
    longest = max(len(prefixes[layer]) for layer in fitting)
    owners = [layer for layer in fitting if len(prefixes[layer]) == longest]
    if len(owners) > 1:
        raise ConfigError(
            f"tied: {parameter!r} may lie in {' or '.join(map(repr, owners))}, whose modules "
            "cannot be built here to see: give these stages prefixes that differ"
        )
    return owners[0]


def require_equal_ties(tied: Sequence[Sequence[str]], kinds: Mapping[str, str]) -> None:
    """Raise ConfigError unless tied parameters exist and have equal dtypes and shapes.

    Args:
        kinds: dtype and shape of the parameters, by their names.
    """
    for group in tied:
        for name in group:
            if name not in kinds:
                raise ConfigError(f"tied: there is no parameter {name!r}{suggest(name, kinds)}")
            if kinds[name] != kinds[group[0]]:
                raise ConfigError(
                    f"tied: {name!r} is {kinds[name]}, but {group[0]!r} is {kinds[group[0]]}"
                )


def under_all_names(
    state: Mapping[str, Tensor], other_names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return the unsplit model's state_dict, which has tied parameters under all their names."""
    return {**state, **{name: state[first] for name, first in other_names.items()}}
