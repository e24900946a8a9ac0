"""Parts of a forward within a `with`: no gradients, another precision. They can be cut as well.

with torch.no_grad():            torch's graph has one operation   we: each operation knows
    for block in self.encoder:   for all of it, with a graph       its regions, and each layer
        x = block(x)             of its own                        enters them anew
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.export import ExportedProgram

CHECKS_A_CAST = "aten._assert_tensor_metadata.default"
"""What torch writes before each `to`: that its tensor still has the dtype that it was cut with."""

WITHIN = "rpcmp_regions"
"""Key in a node's `meta`: the regions that it lies in, the outermost first."""


@dataclass(frozen=True, eq=False)
class Region:
    """One `with` of the module, as often as it is entered.

    Attributes:
        kind: one of `rpcmp.splitting.program.REGIONS`.
        options: of the context.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


def inline(program: ExportedProgram) -> fx.Graph:
    """Return a program's graph with what is computed in regions among the other operations."""
    graph = fx.Graph()
    graph.output(_copy(program.graph, graph, {}, ()))
    return graph


def _copy(
    source: fx.Graph, into: fx.Graph, known: dict[fx.Node, Any], within: tuple[Region, ...]
) -> Any:
    """Copy nodes; returns what the last one, the output, has as arguments.

    Args:
        known: what stands for a node of `source`; nodes that are in it are not copied.
    """
    owner = source.owning_module
    for node in source.nodes:
        if node in known or node.op == "get_attr" or str(node.target) == CHECKS_A_CAST:
            continue
        if node.op == "output":
            return _mapped(node.args[0], known)
        region, inner, args = _region_of(node)
        if region is None:
            known[node] = into.node_copy(node, known.__getitem__)
            known[node].meta[WITHIN] = within
            continue
        body = getattr(owner, str(inner.target)).graph
        parameters = [each for each in body.nodes if each.op == "placeholder"]
        values = [_mapped(each, known) for each in args]
        inside = dict(zip(parameters, values, strict=True))
        results = _copy(body, into, inside, (*within, region))
        for user in node.users:  # all of them pick one of its results
            known[user] = results[user.args[1]]
    raise AssertionError("a graph without an output")


def _mapped(value: Any, known: dict[fx.Node, Any]) -> Any:
    return fx.map_arg(value, known.__getitem__)


def _region_of(node: fx.Node) -> tuple[Region | None, Any, Sequence[Any]]:
    """Return a node's region, the attribute that is its graph, and that graph's arguments."""
    match getattr(node.target, "__name__", ""):
        case "wrap_with_set_grad_enabled":
            enabled, inner, *args = node.args
            return Region("enable_grad" if enabled else "no_grad"), inner, args
        case "wrap_with_autocast":
            # Whether casts are cached is not what the module says: an export never does.
            device, dtype, enabled, _, inner, *args = node.args
            options = {
                # The module has it from a tensor, most often: then it is that of the stage.
                "device_type": None if device == "cpu" else device,
                "dtype": dtype if enabled else None,
                "enabled": enabled,
            }
            return Region("autocast", options), inner, args
    return None, None, ()


def by_region(
    nodes: Iterable[fx.Node], depth: int = 0
) -> Iterator[tuple[Region | None, list[fx.Node]]]:
    """Yield runs of nodes that lie in one region, or in none; `depth` regions are around all."""

    def region_of(node: fx.Node) -> Region | None:
        return next(iter(node.meta[WITHIN][depth:]), None)

    for region, run in itertools.groupby(nodes, region_of):
        yield region, list(run)
