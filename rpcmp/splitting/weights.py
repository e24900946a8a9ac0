"""Which layer holds which parameter or buffer, and under which name.

    used in one layer                       the layer's, by its name in the module
    used in several, and has a name each    one in each layer, tied: an embedding and a head
    used in several, by one name            a copy in each, tied, which no state dict has; if it
                                            is a block's, which runs twice, the layers become one
    used in none                            of the layer whose names are nearest

Buffers that no state dict has are copied into each layer that reads them.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from rpcmp.config.types import COPY
from rpcmp.errors import ConfigError, some_of
from rpcmp.splitting.cutting import BlockGraph, LayerMap, alive, paths_of

log = logging.getLogger(__name__)


@dataclass
class Holdings:
    """What each layer holds.

    Attributes:
        names: per layer, the name in the module by the name in a graph; copies have COPY in it.
        unused: per layer, names of what no operation uses.
        passing: names of buffers that no state dict has.
        tied: names of one parameter in several layers; the first one's is stored.
        aliases: further names of a parameter, which no layer has, by the one that is stored.
    """

    names: list[dict[str, str]]
    unused: list[list[str]] = field(default_factory=list)
    passing: set[str] = field(default_factory=set)
    tied: list[list[str]] = field(default_factory=list)
    aliases: dict[str, list[str]] = field(default_factory=dict)


def assign(
    module: nn.Module, cuts: LayerMap, graphs: Sequence[BlockGraph], blocks: Sequence[str]
) -> Holdings:
    """Decide what each layer holds; join layers of `cuts` that cannot be apart."""
    known = _Names(module, blocks)
    while True:
        layers = [cuts.nodes(graph) for graph in graphs]
        torn = None
        for graph, nodes in zip(graphs, layers, strict=True):
            torn = torn or find_torn(graph, nodes, alive(graph, nodes))
        if torn is None:
            holdings, torn = _hold(known, len(cuts), graphs, layers)
            if torn is None:
                _add_unused(known, holdings)
                return holdings
        cuts.join(*torn)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


class _Names:
    """All names of a module's parameters and buffers; several may be of one."""

    def __init__(self, module: nn.Module, blocks: Sequence[str]) -> None:
        self._blocks = tuple(f"{block}." for block in blocks)
        self.tensors = tensors_of(module)
        stored = module.state_dict().keys()
        self.stored = self.tensors.keys() & stored
        if others := sorted(stored - self.stored):
            log.warning("%s: in no checkpoint and no export, being no tensors", some_of(others))
        same: defaultdict[int, list[str]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            same[id(tensor)].append(name)
        self._same = same
        hidden = [
            names[0]
            for names in same.values()
            if isinstance(self.tensors[names[0]], nn.Parameter) and not self.stored & {*names}
        ]
        if hidden:
            raise ConfigError(
                f"{type(module).__name__}.state_dict leaves out the parameters {some_of(hidden)}, "
                "which no checkpoint would have: return all of them, and choose when you load"
            )

    def all_of(self, name: str) -> list[str]:
        """Return the names of what has this one; those that a state dict has come first."""
        names = self._same[id(self.tensors[name])]
        return sorted(names, key=lambda each: each not in self.stored)

    def may_be_copied(self, name: str) -> bool:
        """Whether it is a parameter, and of no block: a block that runs twice stays whole."""
        is_parameter = isinstance(self.tensors[name], nn.Parameter)
        return is_parameter and not name.startswith(self._blocks)


def _hold(
    known: _Names,
    count: int,
    graphs: Sequence[BlockGraph],
    layers: Sequence[Sequence[list[fx.Node]]],
) -> tuple[Holdings, tuple[int, int] | None]:
    """Return the holdings, and two layers that cannot be apart, if there are any."""
    holdings = Holdings([{} for _ in range(count)])
    users: defaultdict[str, dict[int, fx.Node]] = defaultdict(dict)
    for graph, of_layers in zip(graphs, layers, strict=True):
        for number, nodes in enumerate(of_layers):
            for name, user in graph.uses(nodes).items():
                users[name].setdefault(number, user)
        for node in graph.outputs:
            if node.name in graph.targets:  # the module returns it as it is
                users[node.name].setdefault(count - 1, node)
    targets = {name: target for graph in graphs for name, target in graph.targets.items()}
    owners: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for name, by_layer in users.items():
        names = known.all_of(targets[name])
        first = names[0]
        for number, user in sorted(by_layer.items()):
            if first not in known.stored:  # a buffer, which may be copied
                holdings.names[number][name] = first
                holdings.passing.add(first)
                continue
            own = owners[first].get(number) or _choose(names, owners[first].values(), user)
            if own is None and known.may_be_copied(first):
                own = f"{first}{COPY}{number}"
            if own is None:
                taken = sorted([*owners[first], number])
                return holdings, (taken[0], taken[-1])
            owners[first][number] = holdings.names[number][name] = own
    for first, by_number in owners.items():
        names = [by_number[number] for number in sorted(by_number)]
        if len(names) > 1:
            holdings.tied.append(names)
        if others := [each for each in known.all_of(first) if each not in names]:
            holdings.aliases[names[0]] = others
    return holdings, None


def _choose(names: Sequence[str], taken: Iterable[str], user: fx.Node) -> str | None:
    """Return the name that a layer knows a parameter by: that of the module that uses it."""
    free = [name for name in names if name not in set(taken)]
    paths = paths_of(user)
    modules = {name: name.rpartition(".")[0] for name in free}
    fits = [name for name in free if modules[name] in paths]
    near = max(free, key=lambda name: _common(name, paths[-1] if paths else ""), default=None)
    return max(fits, key=lambda name: len(modules[name]), default=near)


def _add_unused(known: _Names, holdings: Holdings) -> None:
    """Give what no operation uses, but a state dict has, to the layer with the nearest names."""
    held = {name for names in holdings.names for name in names.values()}
    held |= {alias for names in holdings.aliases.values() for alias in names}
    holdings.unused = [[] for _ in holdings.names]
    for name in sorted(known.stored - held):
        if (first := known.all_of(name)[0]) != name:
            holdings.aliases.setdefault(first, []).append(name)
            continue
        nearness = [_nearness(name, names) for names in holdings.names]
        holdings.unused[nearness.index(max(nearness))].append(name)


def _nearness(name: str, names: Mapping[str, str]) -> int:
    return max((_common(name, other) for other in names.values()), default=0)


def _common(one: str, other: str) -> int:
    """Return how many parts of two dotted names are equal, from the left."""
    count = 0
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def find_torn(
    graph: BlockGraph, layers: Sequence[Sequence[fx.Node]], alive: Sequence[Iterable[fx.Node]]
) -> tuple[int, int] | None:
    """Return two layers that have to be one with all between, if there are any.

    Args:
        alive: what passes into each layer, and what the last one returns.

    Raises:
        ConfigError: the module changes a tensor that is not its parameter or buffer.
    """
    number_of = {node: number for number, nodes in enumerate(layers) for node in nodes}
    memory = graph.memory
    written = memory.written
    held: defaultdict[fx.Node, set[int]] = defaultdict(set)
    for node in graph.held:
        if (base := memory.of(node)) in written:
            if node.name in graph.constants:
                raise ConfigError(
                    f"the module changes {graph.constant_names[node.name]!r}, which no state dict "
                    "has: make it a buffer (`register_buffer`)"
                )
            held[base] |= {number_of[user] for user in node.users if user in number_of}
    for base, numbers in held.items():
        numbers |= {number_of[node] for node in written[base]}
        numbers |= {number_of[node] for node in number_of if memory.of(node) is base}
        if len(numbers) > 1:
            return min(numbers), max(numbers)
    for number, passing in enumerate(alive[:-1]):
        bases = [memory.of(node) for node in passing]
        for base, writers in written.items():
            if number and bases.count(base) > 1 and number_of[writers[-1]] >= number:
                return number - 1, number
    return None
