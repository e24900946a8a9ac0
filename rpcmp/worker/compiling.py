"""`torch.compile` of layers: each by itself, and for each shape by itself.

A layer's compiled code then depends on the layer and on its inputs' shapes alone: not on where the
model is cut, and not on what was computed before. So a run has the bits of one process whose layers
are compiled alike, under every balance, and after a fault as well.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import config as compiler_config

from rpcmp.splitting.layer import SplitLayer

MAX_SHAPES = 64
"""Shapes and modes that one layer is compiled for. More are an error: torch would go on without
compiling, and round otherwise from there on."""

_numbers = itertools.count()

_TORCHS_OWN = ("torch._dynamo", "torch._inductor", "torch._functorch")


def compiled(layer: nn.Module) -> Callable[..., Any]:
    """Return the call of a layer by compiled code, which is made when it is needed first."""

    def call(*inputs: Any) -> Any:
        return layer(*inputs)

    # Of its own for each layer: torch also limits how often one code object is compiled in all.
    call.__code__ = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    compile_ = functools.partial(torch.compile, fullgraph=True, dynamic=False, **_limits())
    if isinstance(layer, SplitLayer):  # checks its inputs in Python
        layer.compile_programs(compile_)
        return layer
    return compile_(call)


def _limits() -> dict[str, Any]:
    """Return the options by which each layer is compiled for up to MAX_SHAPES."""
    # Isolated, so that layers of one class have not one limit together.
    options = {"recompile_limit": MAX_SHAPES, "isolate_recompiles": True}
    known = inspect.signature(torch.compile).parameters
    if "recompile_limit" not in known:  # torch 2.11 has one limit for all
        compiler_config.recompile_limit = MAX_SHAPES
    return {name: value for name, value in options.items() if name in known}


def explain(layer: str, error: Exception) -> Exception:
    """Return an error that says how to go on if a layer could not be compiled; else `error`."""
    if not type(error).__module__.startswith(_TORCHS_OWN):
        return error
    if "RecompileLimit" in type(error).__name__:
        return RuntimeError(
            f"layer {layer!r} had inputs of more than {MAX_SHAPES} shapes, and is compiled for "
            "each: pad them to a few lengths, or leave `compile` out"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return RuntimeError(
        f"layer {layer!r} cannot be compiled: {lines[0] if lines else type(error).__name__}. "
        "`compile = false` in its `[[stages]]` leaves a stage as it is"
    )
