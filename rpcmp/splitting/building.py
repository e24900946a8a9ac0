"""Build a module without its weights, which a host has no memory for, or gets from a file.

    in the constructor     each parameter goes to the meta device as it is registered, so what draws
                           its first values does nothing
    afterwards             each gets memory that nobody has written to yet, which costs none until
                           somebody does

Buffers are computed as usual: many are in no file, such as the frequencies of rotary embeddings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn


def build_without_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that `make` builds; the values of its parameters are not defined.

    Parameters that are one stay one.
    """
    with _on_meta():
        module = make()
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                empty = torch.empty_like(parameter, device="cpu")
                made[parameter] = nn.Parameter(empty, parameter.requires_grad)
            setattr(part, name, made[parameter])
    return module


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module of this process registers it."""
    register = nn.Module.register_parameter
    moved: dict[nn.Parameter, nn.Parameter] = {}  # by the first; keeps both, so no id comes twice

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            if parameter not in moved:
                on_meta = parameter.detach().to("meta")
                moved[parameter] = nn.Parameter(on_meta, parameter.requires_grad)
            parameter = moved[parameter]
        register(module, name, parameter)

    setattr(nn.Module, "register_parameter", register_on_meta)  # noqa: B010  # its type is another
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010
