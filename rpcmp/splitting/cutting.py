"""Cut a module's graph into layers, at the ends of its repeated blocks.

    encoder.block.0, .1, .2         are children of one list, of one class: blocks
    operations, in their order      | embed | block.0 | block.1 | block.2 | norm, head |

Each operation knows in which module it ran. Operations outside of blocks make a layer of their own
if they have parameters, and otherwise belong to the one before. Since operations stand in the order
of their computation, any cut of their list gives programs that can run one after the other; what is
alive at a cut, and nothing else, passes from one to the next.

Training and evaluation give two graphs, cut alike. A parameter belongs to the layer that uses it;
`rpcmp.splitting.weights` says what follows from that. Layers are joined where a cut would change
the model: two layers would hold one parameter, or a value would no longer change with its view.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.nn.utils import parametrize

from rpcmp.errors import ConfigError, did_you_mean, nearest
from rpcmp.splitting import regions
from rpcmp.splitting.aliasing import AliasSets
from rpcmp.splitting.exporting import OWNER, ExportedGraph


def find_blocks(module: nn.Module, patterns: Collection[str] = ()) -> list[str]:
    """Return the names of the blocks, in the order of the module's children.

    Args:
        patterns: of names, with * and ?; without any, the outermost repeated blocks, or else what
            follows each other in an nn.Sequential. Of a pattern's submodules the outermost count.

    Raises:
        ConfigError: a pattern fits no submodule, or two blocks lie in each other.
    """
    if not patterns:
        return list(_children(module, _is_repeated)) or list(_children(module, _is_sequence))
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(nearest(pattern, names))
            raise ConfigError(f"split: {pattern!r} fits no submodule of the model{hint}")
    found = [name for pattern in patterns for name in _outermost(names, pattern)]
    blocks = [name for name in names if name in found]
    for outer, inner in ((a, b) for a in blocks for b in blocks if b.startswith(f"{a}.")):
        raise ConfigError(f"split: {inner!r} lies in {outer!r}: name one of them")
    return blocks


def _outermost(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that fit a pattern, but for those within another one: a * fits dots."""
    fitting = [name for name in names if fnmatchcase(name, pattern)]
    inner = {b for a in fitting for b in fitting if b.startswith(f"{a}.")}
    return [name for name in fitting if name not in inner]


def _children(
    module: nn.Module, is_list: Callable[[nn.Module], bool], prefix: str = ""
) -> Iterator[str]:
    """Yield the names of the children of the outermost modules that are such lists."""
    if is_list(module):
        yield from (f"{prefix}{name}" for name, _ in module.named_children())
        return
    for name, child in module.named_children():
        yield from _children(child, is_list, f"{prefix}{name}.")


def _is_repeated(module: nn.Module) -> bool:
    """Whether a module is a list whose children are all of one class."""
    kinds = [_kind(each) for each in module.children()]
    return _is_list(module) and len(kinds) > 1 and len({*kinds}) == 1


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and len(module) > 1


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _kind(module: nn.Module) -> type:
    """Return a module's class; of a parametrized one, which has a class of its own, that below."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


@dataclass
class Run:
    """Operations that stand together, in one block or between two.

    Attributes:
        place: how many blocks have begun before its end, and whether it lies outside of them.
        block: the block's name; empty outside.
    """

    place: Place
    block: str
    nodes: list[fx.Node] = field(default_factory=list)


class BlockGraph:
    """A module's graph in one mode, and which of its operations are in which block.

    Attributes:
        weights: names in the graph of parameters.
        targets: names in the module of parameters and buffers, by name in the graph.
        constants: tensors that the module's forward has made of numbers, by name in the graph;
            `constant_names` has where it keeps them.
        held: what the module has, not its inputs.
        memory: which values share it.
    """

    def __init__(self, exported: ExportedGraph, blocks: Iterable[str]) -> None:
        signature = exported.program.graph_signature
        self._graph = regions.inline(exported.program)  # its nodes live as long as it does
        self.memory = AliasSets(self._graph)
        nodes = list(self._graph.nodes)
        placeholders = {node.name: node for node in nodes if node.op == "placeholder"}
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        self.inputs = [placeholders[n] for n, s in specs.items() if s.kind is InputKind.USER_INPUT]
        self.weights = {n for n, s in specs.items() if s.kind is InputKind.PARAMETER}
        self.targets = {
            n: str(spec.target).removeprefix(f"{OWNER}.")
            for n, spec in specs.items()
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        }
        self.constant_names = {
            n: str(spec.target).removeprefix(f"{OWNER}.")
            for n, spec in specs.items()
            if spec.kind is InputKind.CONSTANT_TENSOR
        }
        self.constants = {
            n: exported.program.constants[str(specs[n].target)] for n in self.constant_names
        }
        self.held = [placeholders[n] for n in [*self.targets, *self.constants]]
        self.operations = [node for node in nodes if node.op == "call_function"]
        (output,) = (node for node in nodes if node.op == "output")
        self.outputs: list[fx.Node] = list(output.args[0])
        self.runs = self._runs(set(blocks))

    def _runs(self, blocks: set[str]) -> list[Run]:
        runs: list[Run] = []
        begun = 0
        for node in self.operations:
            if runs and not node.meta.get("nn_module_stack"):  # torch's own, of what is around it
                runs[-1].nodes.append(node)
                continue
            block = next((above for above in _around(paths_of(node)) if above in blocks), "")
            if block and len(runs) > 1 and self._is_back(runs, block):
                runs[-2].nodes += runs.pop().nodes
            if not runs or runs[-1].block != block:
                begun += bool(block)
                runs.append(Run((begun, not block), block))
            runs[-1].nodes.append(node)
        return runs

    def _is_back(self, runs: Sequence[Run], block: str) -> bool:
        """Whether a block goes on, after operations outside of it that have no weights."""
        outside = runs[-1]
        return not outside.block and runs[-2].block == block and not self.weighs(outside)

    def weighs(self, run: Run) -> bool:
        return not self.weights.isdisjoint(self.uses(run.nodes))

    def uses(self, nodes: Iterable[fx.Node]) -> dict[str, fx.Node]:
        """Return what operations use of the module, by name in the graph, and who is the first."""
        found: dict[str, fx.Node] = {}
        for node in nodes:
            for each in node.all_input_nodes:
                if each.name in self.targets:
                    found.setdefault(each.name, node)
        return found


Place: TypeAlias = tuple[int, bool]


def paths_of(node: fx.Node) -> list[str]:
    """Return the submodules in which an operation ran, the outermost first."""
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    paths = (str(path) for path, _ in stack.values())
    return [path.removeprefix(f"{OWNER}.") for path in paths if path.startswith(f"{OWNER}.")]


def _around(paths: Iterable[str]) -> Iterator[str]:
    """Yield submodules and what they lie in: a block's parts may be called without the block."""
    for path in paths:
        parts = path.split(".")
        yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


class LayerMap:
    """Which layer each place belongs to, in both modes; layers are numbered from 0."""

    def __init__(self, training: BlockGraph) -> None:
        self._layer: dict[Place, int] = {}
        for run in training.runs:
            is_own = bool(run.block) or training.weighs(run)
            last = max(self._layer.values(), default=-1)
            self._layer[run.place] = last + 1 if is_own or last < 0 else last
        if not training.runs:
            raise ConfigError("the module computes nothing: there is nothing to cut")
        first = training.runs[0]
        if not first.block and len(self._layer) > 1 and not training.weighs(first):
            self.join(0, 1)

    def __len__(self) -> int:
        return 1 + max(self._layer.values(), default=-1)

    def of(self, place: Place) -> int:
        """Return a place's layer; what runs in one mode only belongs to the layer before it."""
        before = [known for known in self._layer if known <= place]
        return self._layer[max(before)] if before else 0

    def join(self, first: int, last: int) -> None:
        """Make one layer of layers `first` to `last`."""
        for place, layer in self._layer.items():
            if first < layer <= last:
                self._layer[place] = first
            elif layer > last:
                self._layer[place] = layer - (last - first)

    def nodes(self, graph: BlockGraph) -> list[list[fx.Node]]:
        """Return each layer's operations."""
        return [[node for run in runs for node in run.nodes] for runs in self._runs(graph)]

    def blocks(self, graph: BlockGraph) -> list[list[str]]:
        """Return the names of each layer's blocks, as they run; empty for what lies between."""
        return [[run.block for run in runs] for runs in self._runs(graph)]

    def _runs(self, graph: BlockGraph) -> list[list[Run]]:
        layers: list[list[Run]] = [[] for _ in range(len(self))]
        for run in graph.runs:
            layers[self.of(run.place)].append(run)
        return layers


def alive(graph: BlockGraph, layers: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """Return what passes into each layer, and what the last one returns, in the graph's order."""
    born = dict.fromkeys(graph.inputs, -1)
    born |= {node: number for number, nodes in enumerate(layers) for node in nodes}
    last = dict.fromkeys(born, -1)
    for number, nodes in enumerate(layers):
        for node in nodes:
            for each in node.all_input_nodes:
                if each in last:
                    last[each] = max(last[each], number)
    last |= {node: len(layers) for node in graph.outputs if node in last}
    later = [
        [node for node in born if born[node] < number <= last[node]]
        for number in range(1, len(layers))
    ]
    return [graph.inputs, *later, graph.outputs]
