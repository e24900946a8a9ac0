"""Whose each name of the unsplit model is.

A parameter is called there by its layer and its name in it, `block3.attention.weight`; in a stage
of `[[stages]]` by the stage's `prefix`. Prefixes may be alike, or empty, where the unsplit model's
own attributes lie in several stages: then only the modules themselves say whose a name is. So they
are built on the meta device, where tensors have shapes and no memory. What cannot be built here, as
it needs its host, is looked at when the stages have been built.

Parameters that are one and lie in several layers: which stages have them, and that they fit.

The first name owns the parameter: its stage adds up the gradients of all places, in the order of
the names, and its optimizer steps; the others take over what it has become. So there is one state
of an optimizer, one tensor in a checkpoint, and the bits do not depend on where the model is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rpcmp.config.schema import Config
from rpcmp.config.suggestion import NAMED, did_you_mean, nearest, what_there_is
from rpcmp.errors import ConfigError, one_line
from rpcmp.pipelining import layers

_log = logging.getLogger(__name__)


class Named(NamedTuple):
    """What a layer has, under the names of the unsplit model.

    Attributes:
        parameters: what each is, in words, such as "torch.float32 of shape (3, 4)".
        trained: names of those that are not frozen.
        state: names of all that its state_dict has.
    """

    parameters: dict[str, str]
    trained: set[str]
    state: list[str]


def named_parameters_of(
    config: Config, layers_of_stages: Sequence[Sequence[str]]
) -> dict[str, Named] | None:
    """What every layer has; None where one cannot be built on the meta device here.

    Raises:
        ConfigError: two layers have the same name of something.
    """
    plain = config.model_copy(update={"init": None})  # weights change no names
    found: dict[str, Named] = {}
    try:
        for index, names in enumerate(layers_of_stages):
            with torch.device("meta"):
                built = layers.build_layers(plain, index, names)
            for layer, module in built.items():
                found[layer] = _named(module, config.prefix_of(layer), config.stage(index).frozen)
    except Exception as error:  # it needs its host, or says there what is wrong with it
        _log.debug(
            "stage %r cannot be built on the meta device here, so names of parameters are checked "
            "when all stages have been built: %s",
            config.stage_names[index],
            one_line(error),
        )
        return None
    require_distinct({layer: named.state for layer, named in found.items()})
    return found


def _named(module: nn.Module, prefix: str, frozen: bool) -> Named:
    parameters = dict(module.named_parameters(prefix.removesuffix(".")))
    return Named(
        {
            name: f"{value.dtype} of shape {tuple(value.shape)}"
            for name, value in parameters.items()
        },
        {name for name, value in parameters.items() if value.requires_grad and not frozen},
        [prefix + name for name in module.state_dict()],
    )


def require_distinct(names: Mapping[str, Iterable[str]]) -> None:
    """Check that nothing has the same name in two layers.

    Args:
        names: of each layer, or stage.

    Raises:
        ConfigError: something has.
    """
    owners: dict[str, str] = {}
    for owner, its in names.items():
        for name in its:
            if owners.setdefault(name, owner) != owner:
                raise ConfigError(
                    f"{owners[name]!r} and {owner!r} both have {name!r} in the unsplit model: give "
                    "one of the stages another `prefix`, or let their modules name it otherwise"
                )


def layer_of(config: Config, parameter: str, found: Mapping[str, Named | None]) -> str:
    """The layer that a parameter belongs to.

    Args:
        found: what each layer has; None: nobody knows, and its prefix has to tell.

    Raises:
        ConfigError: none, or nobody can tell.
    """
    for layer, named in found.items():
        if named is not None and parameter in named.parameters:
            return layer
    known = [name for named in found.values() if named for name in named.parameters]
    if known:
        raise ConfigError(
            f"tied: there is no parameter {parameter!r}{what_there_is(parameter, known)}"
        )
    prefixes = {layer: config.prefix_of(layer) for layer in found}
    fitting = [layer for layer, prefix in prefixes.items() if parameter.startswith(prefix)]
    if not fitting:
        first, _, rest = parameter.partition(".")
        near = nearest(first, found)
        there_are = ", ".join(map(repr, list(found)[:NAMED]))
        raise ConfigError(
            f"tied: {parameter!r} lies in no layer{did_you_mean(near and f'{near}.{rest}')} (the "
            f"layers are {there_are}{', ...' if len(found) > NAMED else ''})"
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
