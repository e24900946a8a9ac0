"""A module as it is cut: all that a host needs to build and run its layers, as plain data."""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, fx, nn

from rpcmp.errors import MAX_LISTED, ConfigError
from rpcmp.splitting import exporting, guards, weights
from rpcmp.splitting.cutting import BlockGraph, LayerMap, alive, find_blocks
from rpcmp.splitting.exporting import Structure, export
from rpcmp.splitting.program import Node, Program, encode, name_of, name_of_kind
from rpcmp.splitting.regions import Region, by_region
from rpcmp.splitting.weights import Holdings

MAX_SPLIT = 2**26
"""Bytes of a split as JSON. A layer has some 20,000."""

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
        name = name_of_kind(tensor.dtype)
        return cls(dtype=name, shape=list(tensor.shape), data=base64.b64encode(raw).decode())

    def tensor(self) -> Tensor:
        raw = bytearray(base64.b64decode(self.data))
        dtype = vars(torch).get(self.dtype)
        if not isinstance(dtype, torch.dtype) or math.prod(self.shape) * dtype.itemsize != len(raw):
            raise ConfigError(f"a constant of {self.dtype}{self.shape} has {len(raw)} bytes")
        if not raw:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(self.shape).clone()


class LayerPlan(_Plain):
    """A layer.

    Attributes:
        training, evaluation: what it computes in each mode.
        tensors: names in the module of its parameters and buffers.
        passing: those of them that no state dict has.
        runs: names of the blocks that run in it, in order; empty ones are what lies between.
        receives: what passes into it, such as "float32[*, *, 32]" or "size".
        received_bytes: of that, per sample, at the lengths that it was cut with.
    """

    name: str
    runs: list[str]
    receives: list[str]
    received_bytes: int
    training: Program
    evaluation: Program
    tensors: list[str]
    passing: list[str]


class Split(_Plain):
    """A module, cut into layers.

    Attributes:
        structures: where the outputs stand in what the module returns, in training and evaluation.
        outputs: dtypes and sizes of the outputs in training, for the samples that it was cut with.
        tied, aliases: see `Holdings`.
        constants: by name below CONSTANTS.
        guards: what has to hold for the sizes of the inputs, see `rpcmp.splitting.guards`.
    """

    inputs: list[InputPlan]
    guards: list[str]
    layers: list[LayerPlan]
    structures: tuple[Structure, Structure]
    outputs: list[tuple[str, list[int]]]
    tied: list[list[str]]
    aliases: dict[str, list[str]]
    constants: dict[str, Constant]

    def pack(self) -> str:
        """Return it as text for a config."""
        return base64.b64encode(zlib.compress(self.model_dump_json().encode())).decode()

    @classmethod
    def unpack(cls, text: str) -> Split:
        """Return what `pack` has packed; raises ValueError if it is something else."""
        try:
            unzip = zlib.decompressobj()
            data = unzip.decompress(base64.b64decode(text), MAX_SPLIT)
        except zlib.error as error:
            raise ValueError(f"no split: {error}") from error
        if unzip.unconsumed_tail:
            raise ValueError(f"a split of more than {MAX_SPLIT} bytes")
        return cls.model_validate_json(data)


def split_module(
    module: nn.Module,
    batch: Any,
    patterns: Collection[str] = (),
    autocast: torch.dtype | None = None,
) -> Split:
    """Export a module and cut it into layers; its parameters are not read.

    Args:
        batch: see `rpcmp.splitting.exporting.export`.
        patterns: of the submodules that are layers; see `find_blocks`.
        autocast: what the layers will be run in, since a module may look at its tensors' dtypes.

    Raises:
        ConfigError: the module cannot be exported or cut.
    """
    blocks = find_blocks(module, patterns)
    modes = {part: part.training for part in module.modules()}
    try:
        exports = [export(module, batch, training, autocast) for training in (True, False)]
    finally:
        for part, was_training in modes.items():
            part.training = was_training
    graphs = [BlockGraph(each, blocks) for each in exports]
    cuts = LayerMap(graphs[0])
    holdings = weights.assign(module, cuts, graphs, blocks)
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
    passing = alive(graphs[0], cuts.nodes(graphs[0]))
    samples = exporting.arguments(batch)[1][0].shape[0]
    layers = [
        LayerPlan(
            name=name,
            runs=runs,
            receives=[_kind(node) for node in received],
            received_bytes=round(sum(map(_bytes, received)) / samples),
            training=training,
            evaluation=evaluation,
            tensors=tensors,
            passing=[each for each in tensors if each in holdings.passing],
        )
        for name, runs, training, evaluation, tensors, received in zip(
            names, cuts.blocks(graphs[0]), *programs, held, passing[:-1], strict=True
        )
    ]
    return Split(
        inputs=_inputs(graphs, exporting.arguments(batch)[0]),
        guards=list(dict.fromkeys(guards.from_torch(g) for each in exports for g in each.guards)),
        layers=layers,
        structures=(exports[0].structure, exports[1].structure),
        outputs=[_sizes(node) for node in graphs[0].outputs],
        tied=holdings.tied,
        aliases=holdings.aliases,
        constants=constants,
    )


TORCH = Path(torch.__file__).parent

MODES = ("in_training", "in_evaluation")
"""As submodules of CONSTANTS."""


def _names_of_layers(cuts: LayerMap, graph: BlockGraph, holdings: Holdings) -> list[str]:
    """Return a name per layer: its first block, or the first module that it has weights of."""
    names: list[str] = []
    for blocks, held in zip(cuts.blocks(graph), holdings.names, strict=True):
        of_weights = [name.rpartition(".")[0] for name in held.values()]
        name = next((each for each in [*blocks, *of_weights] if each), "inputs")
        while name in names:
            name += "+"
        names.append(name)
    return names


def _programs(graph: BlockGraph, cuts: LayerMap, holdings: Holdings, mode: str) -> list[Program]:
    layers = cuts.nodes(graph)
    passing = alive(graph, layers)
    return [
        Program(
            inputs=[node.name for node in passing[number]],
            nodes=_nodes(nodes, passing[number + 1]),
            outputs=[encode(node) for node in passing[number + 1]],
            tensors=_tensors(graph, [*nodes, *passing[number + 1]], holdings.names[number], mode),
        )
        for number, nodes in enumerate(layers)
    ]


def _tensors(
    graph: BlockGraph, nodes: Sequence[fx.Node], names: dict[str, str], mode: str
) -> dict[str, str]:
    used = dict.fromkeys(each.name for node in nodes for each in (node, *node.all_input_nodes))
    held = {name: names[name] for name in used if name in names}
    constants = {n: f"{CONSTANTS}.{mode}.{n}" for n in used if n in graph.constants}
    return held | constants


def _nodes(nodes: Sequence[fx.Node], read: Collection[fx.Node], depth: int = 0) -> list[Node]:
    """Return operations as data, those of a region in a body.

    Args:
        read: values that are needed after these operations.
        depth: of the regions that lie around all of them.
    """
    found: list[Node] = []
    later = {each: index for index, node in enumerate(nodes) for each in node.all_input_nodes}
    index = 0
    for region, run in by_region(nodes, depth):
        index += len(run)
        if region is None:
            found += map(_node, run)
            continue
        given = [node for node in run if node in read or later.get(node, 0) >= index]
        found += _region(region, run, given, depth)
    return found


def _region(
    region: Region, run: Sequence[fx.Node], given: Sequence[fx.Node], depth: int
) -> Iterator[Node]:
    """Yield a region as one operation, and one for each of the values that it gives."""
    inside = set(run)
    taken = dict.fromkeys(
        each for node in run for each in node.all_input_nodes if each not in inside
    )
    name = f"{run[0].name}_and_on"
    body = Program(
        inputs=[node.name for node in taken],
        nodes=_nodes(run, given, depth + 1),
        outputs=[encode(node) for node in given],
    )
    yield Node(
        name=name,
        calls=region.kind,
        args=[encode(node) for node in taken],
        kwargs={key: encode(each) for key, each in region.options.items()},
        body=body,
        where=_where(run[0]),
    )
    for number, node in enumerate(given):
        yield Node(name=node.name, calls="operator.getitem", args=[{"of": name}, number])


def _node(node: fx.Node) -> Node:
    where, calls = _where(node), name_of(node.target)
    if calls is None:
        raise ConfigError(f"{where or 'the module'} calls {node.target}, which no layer can")
    return Node(
        name=node.name,
        calls=calls,
        args=[encode(each) for each in node.args],
        kwargs={key: encode(each) for key, each in node.kwargs.items()},
        where=where,
    )


def _where(node: fx.Node) -> str:
    """Return the innermost line outside of torch that an operation comes from, "net.py:12"."""
    trace = node.meta.get("stack_trace") or ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = [(Path(file).name, line) for file, line in lines if TORCH not in Path(file).parents]
    return ":".join(own[-1]) if own else ""


def _inputs(graphs: Sequence[BlockGraph], names: Sequence[str]) -> list[InputPlan]:
    """Return what the inputs have to be for all graphs."""
    plans = []
    for name, *nodes in zip(names, *(graph.inputs for graph in graphs), strict=True):
        values = [node.meta["val"] for node in nodes]
        sizes = [_size(each) for each in zip(*(value.shape for value in values), strict=True)]
        dtype = name_of_kind(values[0].dtype)
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


def _kind(node: fx.Node) -> str:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return "size"
    sizes = ("*" if (size := _concrete(each)) is None else str(size) for each in value.shape)
    return f"{name_of_kind(value.dtype)}[{', '.join(sizes)}]"


def _sizes(node: fx.Node) -> tuple[str, list[int]]:
    """Return the dtype and the sizes of a tensor, in the samples that the module was cut with.

    Of a size: "size", and which it is.
    """
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return "size", [value if isinstance(value, int) else int(value.node.hint)]
    sizes = [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    return name_of_kind(value.dtype), sizes


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return math.prod(_sizes(node)[1]) * value.element_size() if isinstance(value, Tensor) else 0


def _size(sizes: Sequence[Any]) -> int | None:
    """Return the only size that all graphs are for; None: any."""
    return next((size for each in sizes if (size := _concrete(each)) is not None), None)


def _concrete(size: Any) -> int | None:
    """Return a size as a number; None if it is a symbol without a value."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # sympy: half of all imports

    # A size that the forward made a plain number of is still a symbol, but has one value.
    return int(size) if is_concrete_int(size) else None
