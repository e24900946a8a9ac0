"""An `nn.Module` that a job cuts, run as it is: the reference of `rpcmp verify` for it.

Nobody has cut this one: its own `forward` runs, eagerly. Hooks do at the places where the job cuts
it what a cut does there:

    block 1 ──returns──> │ random numbers of the next layer; what passes is contiguous and aligned,
                         │ forwards and as a gradient; casts of autocast are forgotten;
                         │ the layer's own copy of a tied parameter ──> block 2

The parameters and buffers are those of the job's layers, which the reference optimizes; their first
values are those that the module's constructor has drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.config.schema import Config
from rpcmp.errors import JobError
from rpcmp.pipelining.split_layers import build_module, unpacked
from rpcmp.splitting.exporting import plain
from rpcmp.splitting.split import LayerPlan
from rpcmp.splitting.weights import tensors_of

Between = Callable[[Any], Any]
"""What a value goes through that passes from layer to layer."""


class EagerModule:
    """The module of a config with a `cut`.

    Args:
        layers: those that it was cut into, by name; their tensors become the module's.
        seed: called with the name of a layer, before it.
    """

    def __init__(
        self,
        config: Config,
        layers: Mapping[str, nn.Module],
        seed: Callable[[str], None],
        between: Between,
    ) -> None:
        assert config.cut is not None
        self._split = unpacked(config.cut)
        self._seed, self._between = seed, between
        self.module = build_module(config).train()
        self._tied = _take_over(self.module, layers, config, draws=config.init is None)
        self._runs = _Runs(self._split.layers)
        for path, part in self.module.named_modules():
            if path:
                self._watch(path, part)

    def __call__(self, inputs: Any) -> Any:
        """Return what the module returns, with dicts and tuples in place of classes."""
        self._runs.start()
        self._enter(0)
        names = [plan.name for plan in self._split.inputs]
        if isinstance(inputs, Mapping):
            outputs = self.module(**{name: inputs[name] for name in names})
        else:
            outputs = self.module(*(inputs if isinstance(inputs, tuple | list) else [inputs]))
        self._runs.end()
        return plain(outputs)

    def _watch(self, path: str, part: nn.Module) -> None:
        block = self._runs.block_of(path)
        if block is None:  # blocks lie in it
            return

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # Within a block that is called as a whole, its parts are no news.
            if block == self._runs.current or (entered := self._runs.move_to(block)) is None:
                return None
            self._enter(entered)
            return self._between(tuple(args)), self._between(dict(kwargs))

        def after(module: nn.Module, args: Any, outputs: Any) -> Any:
            if (entered := self._runs.leave()) is None:
                return None
            self._enter(entered)
            return self._between(outputs)

        part.register_forward_pre_hook(before, with_kwargs=True)
        if path == block:
            part.register_forward_hook(after)

    def _enter(self, number: int) -> None:
        name = self._split.layers[number].name
        torch.clear_autocast_cache()
        for holders, copies in self._tied:
            if name in copies:
                for module, attribute in holders:
                    module._parameters[attribute] = copies[name]
        self._seed(name)


class _Runs:
    """Where the module is among the runs of its blocks, and which layer that is."""

    def __init__(self, layers: Sequence[LayerPlan]) -> None:
        self._runs = [(number, block) for number, plan in enumerate(layers) for block in plan.runs]
        self._blocks = {block for _, block in self._runs if block}
        self.start()

    def start(self) -> None:
        self._position = 0
        # A block that comes first is still to be entered.
        self.current = "" if not self._runs[0][1] else None

    def end(self) -> None:
        last = max((n for n, (_, block) in enumerate(self._runs) if block), default=0)
        if self._position < last:
            raise JobError(f"the module has not run {self._runs[last][1]!r}, as it did when cut")

    def block_of(self, path: str) -> str | None:
        """Return the block that a submodule lies in; empty if in none, None if around some."""
        if any(block.startswith(f"{path}.") for block in self._blocks):
            return None
        fits = (block for block in self._blocks if f"{path}.".startswith(f"{block}."))
        return next(fits, "")

    def move_to(self, block: str) -> int | None:
        """Return the layer that begins where this block, or what lies outside of all, runs."""
        self.current = block
        if self._runs[self._position][1] == block:
            return None
        return self._advance_to(block)

    def leave(self) -> int | None:
        """Return the layer that begins behind a block, where no other block follows at once."""
        self.current = None
        following = self._runs[self._position + 1 : self._position + 2]
        if not following or following[0][1]:
            return None
        return self._advance_to("")

    def _advance_to(self, block: str) -> int | None:
        before = self._runs[self._position][0]
        for position in range(self._position + 1, len(self._runs)):
            number, name = self._runs[position]
            if name == block:
                self._position = position
                return number if number != before else None
            if name:  # another block would be left out
                break
        if not block:
            return None  # operations that belong to the block before
        raise JobError(f"the module runs {block!r} in another order than when it was cut")


Holders = list[tuple[nn.Module, str]]
"""Modules that have a parameter, and its name in each."""


def _take_over(
    module: nn.Module, layers: Mapping[str, nn.Module], config: Config, draws: bool
) -> list[tuple[Holders, dict[str, nn.Parameter]]]:
    """Give a module the layers' tensors; returns tied ones, with each layer's copy by its name.

    Args:
        draws: whether the module's values are the first ones; else the layers'.
    """
    own: dict[str, tuple[str, Tensor]] = {}
    for layer, part in layers.items():
        stored = part.state_dict().keys()
        tensors = tensors_of(part).items()
        own |= {name: (layer, each) for name, each in tensors if name in stored}
    groups = {name: group for group in config.tied for name in group}
    tied: list[tuple[Holders, dict[str, nn.Parameter]]] = []
    for original, names in _names(module).items():
        known = [name for name in names if name in own]
        group = groups.get(known[0], known[:1]) if known else []
        copies = {own[name][0]: own[name][1] for name in group}
        for copy in copies.values():
            if draws:
                with torch.no_grad():
                    copy.copy_(original)
        holders = [_holder(module, name) for name in names]
        for holder, attribute in holders if copies else []:
            first = next(iter(copies.values()))
            kind = holder._parameters if isinstance(original, nn.Parameter) else holder._buffers
            kind[attribute] = first  # type: ignore[assignment]
        if len(copies) > 1:
            tied.append((holders, copies))  # type: ignore[arg-type]
    if not draws:  # a constructor that draws no parameters draws other buffers, too
        buffers = {name: each for part in layers.values() for name, each in part.named_buffers()}
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers.get(name, buffer))
    return tied


def _names(module: nn.Module) -> dict[Tensor, list[str]]:
    names: dict[Tensor, list[str]] = {}
    for name, tensor in tensors_of(module).items():
        names.setdefault(tensor, []).append(name)
    return names


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    above, _, attribute = name.rpartition(".")
    return module.get_submodule(above), attribute
