"""A module as it is cut: all that a host needs to build and run its layers, as plain data."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from rpcmp.errors import MAX_LISTED, ConfigError
from rpcmp.splitting import exporting, weights
from rpcmp.splitting.cutting import Cuts, Graph, alive, find_blocks
from rpcmp.splitting.exporting import Structure, export
from rpcmp.splitting.program import REGIONS, Node, Program, encode, name_of
from rpcmp.splitting.weights import Holdings

CONSTANTS = "_constants"
"""The submodule of a layer that has the constants of its programs."""


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InputPlan(_Plain):
    """What an argument of the module has to be.

    Attributes:
        name: its keyword; a number for a positional argument.
        sizes: of its dimensions; None: any.
    """

    name: str
    dtype: str
    sizes: list[int | None]


class Constant(_Plain):
    """A tensor that the module's forward makes of numbers; `data` is base64."""

    dtype: str
    shape: list[int]
    data: str

    @classmethod
    def of(cls, tensor: Tensor) -> Constant:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype=name, shape=list(tensor.shape), data=base64.b64encode(raw).decode())

    def tensor(self) -> Tensor:
        raw = bytearray(base64.b64decode(self.data))
        dtype = getattr(torch, self.dtype)
        if not raw:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(self.shape).clone()


class LayerPlan(_Plain):
    """A layer.

    Attributes:
        training, evaluation: what it computes in each mode.
        tensors: names in the module of its parameters and buffers.
        passing: those of them that no state dict has.
    """

    name: str
    training: Program
    evaluation: Program
    tensors: list[str]
    passing: list[str]


class Split(_Plain):
    """A module, cut into layers.

    Attributes:
        structures: where the outputs stand in what the module returns, in training and evaluation.
        tied, aliases: see `Holdings`.
        constants: by name below CONSTANTS.
    """

    inputs: list[InputPlan]
    layers: list[LayerPlan]
    structures: tuple[Structure, Structure]
    tied: list[list[str]]
    aliases: dict[str, list[str]]
    constants: dict[str, Constant]


def split_module(module: nn.Module, batch: Any, patterns: Collection[str] = ()) -> Split:
    """Export a module and cut it into layers; its parameters are not read.

    Args:
        batch: see `rpcmp.splitting.exporting.export`.
        patterns: of the submodules that are layers; see `find_blocks`.

    Raises:
        ConfigError: the module cannot be exported or cut.
    """
    blocks = find_blocks(module, patterns)
    modes = {part: part.training for part in module.modules()}
    try:
        exports = [export(module, batch, training) for training in (True, False)]
    finally:
        for part, was_training in modes.items():
            part.training = was_training
    graphs = [Graph(each, blocks) for each in exports]
    cuts = Cuts(graphs[0])
    holdings = weights.assign(module, cuts, graphs)
    names = _names_of_layers(cuts, graphs[0], holdings)
    by_mode = dict(zip(MODES, graphs, strict=True))
    programs = [_programs(graph, cuts, holdings, mode) for mode, graph in by_mode.items()]
    constants = {
        f"{mode}.{name}": Constant.of(tensor)
        for mode, graph in by_mode.items()
        for name, tensor in graph.constants.items()
    }
    held = [
        sorted({*names.values(), *unused})
        for names, unused in zip(holdings.names, holdings.unused, strict=True)
    ]
    layers = [
        LayerPlan(
            name=name,
            training=training,
            evaluation=evaluation,
            tensors=tensors,
            passing=[each for each in tensors if each in holdings.passing],
        )
        for name, training, evaluation, tensors in zip(names, *programs, held, strict=True)
    ]
    return Split(
        inputs=_inputs(graphs, exporting.arguments(batch)[0]),
        layers=layers,
        structures=(exports[0].structure, exports[1].structure),
        tied=holdings.tied,
        aliases=holdings.aliases,
        constants=constants,
    )


TORCH = Path(torch.__file__).parent

MODES = ("in_training", "in_evaluation")
"""As submodules of CONSTANTS."""


def _names_of_layers(cuts: Cuts, graph: Graph, holdings: Holdings) -> list[str]:
    """Return a name per layer: its first block, or the first module that it has weights of."""
    names: list[str] = []
    for blocks, held in zip(cuts.blocks(graph), holdings.names, strict=True):
        of_weights = [name.rpartition(".")[0] for name in held.values()]
        name = next((each for each in [*blocks, *of_weights] if each), "inputs")
        while name in names:
            name += "+"
        names.append(name)
    return names


def _programs(graph: Graph, cuts: Cuts, holdings: Holdings, mode: str) -> list[Program]:
    layers = cuts.nodes(graph)
    passing = alive(graph, layers)
    return [
        Program(
            inputs=[node.name for node in passing[number]],
            nodes=[_node(node) for node in nodes],
            outputs=[encode(node) for node in passing[number + 1]],
            tensors=_tensors(graph, [*nodes, *passing[number + 1]], holdings.names[number], mode),
        )
        for number, nodes in enumerate(layers)
    ]


def _tensors(
    graph: Graph, nodes: Sequence[fx.Node], names: dict[str, str], mode: str
) -> dict[str, str]:
    used = dict.fromkeys(each.name for node in nodes for each in (node, *node.all_input_nodes))
    held = {name: names[name] for name in used if name in names}
    constants = {n: f"{CONSTANTS}.{mode}.{n}" for n in used if n in graph.constants}
    return held | constants


def _node(node: fx.Node) -> Node:
    owner = node.graph.owning_module
    where = _where(node)
    calls, body = name_of(node.target), None
    args: list[Any] = list(node.args)
    kwargs: dict[str, Any] = dict(node.kwargs)
    region = getattr(node.target, "__name__", "")
    if region == "wrap_with_set_grad_enabled":
        enabled, inner, *args = args
        calls, body = REGIONS[bool(enabled)], _body(owner, inner)
    elif region == "wrap_with_autocast":
        _, dtype, enabled, cache, inner, *args = args
        kwargs = {"dtype": dtype, "enabled": enabled, "cache_enabled": cache}
        calls, body = REGIONS[2], _body(owner, inner)
    if calls is None:
        raise ConfigError(f"{where or 'the module'} calls {node.target}, which no layer can")
    return Node(
        name=node.name,
        calls=calls,
        args=[encode(each) for each in args],
        kwargs={key: encode(each) for key, each in kwargs.items()},
        body=body,
        where=where,
    )


def _body(owner: Any, inner: Any) -> Program:
    nodes = list(getattr(owner, str(inner.target)).graph.nodes)
    (output,) = (node for node in nodes if node.op == "output")
    return Program(
        inputs=[node.name for node in nodes if node.op == "placeholder"],
        nodes=[_node(node) for node in nodes if node.op == "call_function"],
        outputs=[encode(each) for each in output.args[0]],
    )


def _where(node: fx.Node) -> str:
    """Return the innermost line outside of torch that an operation comes from, "net.py:12"."""
    trace = node.meta.get("stack_trace") or ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [(Path(file).name, line) for file, line in lines if TORCH not in Path(file).parents]
    return ":".join(own[-1]) if own else ""


def _inputs(graphs: Sequence[Graph], names: Sequence[str]) -> list[InputPlan]:
    """Return what the inputs have to be for all graphs."""
    plans = []
    for name, *nodes in zip(names, *(graph.inputs for graph in graphs), strict=True):
        values = [node.meta["val"] for node in nodes]
        sizes = [_size(each) for each in zip(*(value.shape for value in values), strict=True)]
        dtype = str(values[0].dtype).removeprefix("torch.")
        plans.append(InputPlan(name=name, dtype=dtype, sizes=sizes))
    if scalars := [plan.name for plan in plans if not plan.sizes]:
        raise ConfigError(f"input {scalars[0]!r} has no dimension of samples")
    if fixed := [plan.name for plan in plans if plan.sizes[0] is not None]:
        names_of_fixed = ", ".join(map(repr, fixed[:MAX_LISTED]))
        raise ConfigError(
            f"the module fixes the number of samples of {names_of_fixed}, which differs between "
            "mini-batches: it must not use that number as a plain number, such as in range()"
        )
    return plans


def _size(sizes: Sequence[Any]) -> int | None:
    """Return the only size that all graphs are for; None: any."""
    # A size that the forward made a plain number of is still a symbol, but has one value.
    return next((int(size) for size in sizes if is_concrete_int(size)), None)
