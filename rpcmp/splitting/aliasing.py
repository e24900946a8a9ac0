"""Which values of a graph share memory, so that no cut may part them.

    first = self.inner(x)        passes the cut
    view = first.view(-1, 2)     passes it as well
    ------------------------     cut: another host gets two tensors that share nothing
    first.mul_(2)                would no longer change `view`

That two values share memory is what torch says of an operation (its schema), and what the export
has seen (their storages). Some operations say nothing and return their argument all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

MAY_RETURN_ITS_ARGUMENT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
"""In evaluation, which the export does not see; torch's schema does not tell either."""

WRITES_NO_VALUES = ("detach_", "requires_grad_", "set_data")
"""Operations that change how a tensor is differentiated, and not its memory."""


class AliasSets:
    """Which values of a graph share memory.

    Attributes:
        written: the operations that write to a value's memory, by `of` of the value.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._above: dict[fx.Node, fx.Node] = {}
        self.written: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
        storages: dict[int, tuple[Any, fx.Node]] = {}  # with the storage: no id may come twice
        for node in graph.nodes:
            for storage in map(Tensor.untyped_storage, _tensors_of(node)):
                self._join(node, storages.setdefault(id(storage), (storage, node))[1])
            for other in _shares(node):
                self._join(node, other)
        for node in graph.nodes:
            for written in _writes(node):
                self.written[self.of(written)].append(node)

    def of(self, node: fx.Node) -> fx.Node:
        """Return one of the values that share this one's memory, the same for all of them."""
        while node in self._above:
            node = self._above[node]
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        one, other = self.of(one), self.of(other)
        if one is not other:
            self._above[one] = other


def _tensors_of(node: fx.Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    for each in value if isinstance(value, tuple | list) else [value]:
        if isinstance(each, Tensor):
            yield each


def _arguments(node: fx.Node) -> Iterator[tuple[Any, list[fx.Node]]]:
    """Yield an operation's parameters as torch declares them, with the values for each."""
    schema = getattr(node.target, "_schema", None)
    for number, parameter in enumerate(() if schema is None else schema.arguments):
        given = node.args[number] if number < len(node.args) else node.kwargs.get(parameter.name)
        yield parameter, _nodes_in(given)


def _nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _name_of(node: fx.Node) -> str:
    """Return "relu_" of "aten.relu_.default", and "getitem" of the function."""
    parts = str(node.target).split(".")
    return parts[1] if len(parts) > 2 else getattr(node.target, "__name__", "")


def _shares(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments whose memory an operation returns, or may return."""
    if node.op != "call_function":
        return
    if _name_of(node) in MAY_RETURN_ITS_ARGUMENT:
        yield from node.all_input_nodes[:1]
    for parameter, values in _arguments(node):
        if parameter.alias_info is not None:
            yield from values
    if _name_of(node) == "getitem":  # one of several results
        yield from node.all_input_nodes[:1]


def _writes(node: fx.Node) -> Iterator[fx.Node]:
    if _name_of(node) in WRITES_NO_VALUES:
        return
    for parameter, values in _arguments(node):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            yield from values
