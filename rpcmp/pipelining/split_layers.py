"""The layers of a [model] that is an `nn.Module`, which was cut before the run.

Parameters have the values that the module's own constructor draws under the config's seed, so
every process runs the whole constructor, keeps its own layers and drops the rest. Where weights
come from a file (`init`), the constructor gets no memory for parameters; nor where only shapes are
asked for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.config import importing
from rpcmp.config.job_sections import ModelCut
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.pipelining import random_streams
from rpcmp.splitting.building import (
    build_without_weights,
    init_at,
    require_own_memory,
    require_plain,
)
from rpcmp.splitting.layer import SplitLayer
from rpcmp.splitting.split import Split
from rpcmp.splitting.weights import tensors_of

_draws_values = True


@contextlib.contextmanager
def any_values() -> Iterator[None]:
    """Give layers that are built some values or other, which cost little: to measure them."""
    global _draws_values
    _draws_values = False
    try:
        yield
    finally:
        _draws_values = True


def layer_factories(config: Config) -> dict[str, Callable[[], nn.Module]]:
    """Return the factories of the layers of a module that was cut, by name, in order."""
    if config.cut is None:
        raise ConfigError("the model's `module` has not been cut")
    split = unpacked(config.cut)
    source = _WeightSource(config)
    return {
        layer.name: functools.partial(source.build, split, index)
        for index, layer in enumerate(split.layers)
    }


def unpacked(cut: ModelCut) -> Split:
    """Return a cut's split, which a process unpacks once; raises ValueError if it is none."""
    return _unpacked(cut.split)


@functools.lru_cache(maxsize=2)
def _unpacked(text: str) -> Split:
    return Split.unpack(text)


def build_module(config: Config) -> nn.Module:
    """Return the module as its constructor makes it under the config's seed.

    Raises:
        FactoryError: it cannot be built, or is no nn.Module.
    """
    model = config.model
    if model is None or model.module is None:
        raise ConfigError("the job has no [model] with a `module`")
    random_streams.seed_plainly(config.seed)
    try:
        with init_at(config.init):
            source = Factory(callable=model.module, kwargs=model.kwargs)
            module = importing.create(source, "model.module")
    except MemoryError as error:
        raise FactoryError(
            f"{model.module}: there is no memory for the whole model, whose constructor draws all "
            "parameters: give weights (`init`), and each host has memory for its own only"
        ) from error
    if not isinstance(module, nn.Module):
        raise FactoryError(
            f"model.module = {model.module!r} returns {type(module).__name__}, not an nn.Module"
        )
    require_plain(module, f"model.module = {model.module!r}")
    module.train()  # as before any training: some freeze parts of themselves there
    return module


def build_skeleton(config: Config) -> nn.Module:
    """Return the module without values of parameters, which need no memory then.

    A constructor that cannot do without them, such as one that loads a file, gets them.
    """
    try:
        with torch.device("cpu"):
            return build_without_weights(functools.partial(build_module, config))
    except Exception:
        with torch.device("cpu"):
            module = build_module(config)
        require_own_memory(module)
        return module


class _WeightSource:
    """Where the tensors of all layers come from; the module is built once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tensors: dict[str, Tensor] | None = None

    def build(self, split: Split, index: int) -> nn.Module:
        is_meta = torch.get_default_device().type == "meta"
        if self._tensors is None:
            without = is_meta or not _draws_values or self._config.init is not None
            module = build_skeleton(self._config) if without else build_module(self._config)
            self._tensors = tensors_of(module)
        tensors = self._tensors
        if not is_meta and not _draws_values:
            own = {*split.layers[index].tensors}
            tensors = {n: _filled(t) if n in own else t for n, t in tensors.items()}
        with torch.device("cpu"):
            layer = SplitLayer(split, index, tensors)
        return layer.to("meta") if is_meta else layer


def _filled(tensor: Tensor) -> Any:
    if not isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return tensor.clone()
    # Memory that nobody has written to is all one page, which is faster than any real.
    return nn.Parameter(torch.empty_like(tensor).uniform_(-0.1, 0.1), tensor.requires_grad)
