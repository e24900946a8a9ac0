"""How a list of layers is cut into stages.

    layers   embedding block0 block1 block2 block3 head        balance = [2, 2, 2]
    stages   └── stage0 ────┘ └── stage1 ──┘ └─ stage2 ──┘

A balance is the number of consecutive layers of each stage. Without one, cuts are chosen by size
so that the largest stage is as small as possible (exact, by bisection on that size).
"""

from __future__ import annotations

from collections.abc import Sequence

from rpcmp.errors import ConfigError


def cut(layers: Sequence[str], balance: Sequence[int]) -> list[list[str]]:
    """The names of the layers of each stage.

    Raises:
        ConfigError: the balance does not add up to the number of layers.
    """
    if sum(balance) != len(layers):
        raise ConfigError(
            f"balance = {list(balance)} adds up to {sum(balance)}, but the model has "
            f"{len(layers)} layers: {', '.join(layers)}"
        )
    result, start = [], 0
    for count in balance:
        result.append(list(layers[start : start + count]))
        start += count
    return result


def balance_by_size(sizes: Sequence[int], num_stages: int) -> list[int]:
    """The balance whose largest stage is smallest.

    Args:
        sizes: cost of each layer, such as its number of parameters; at least zero.
        num_stages: how many stages; each gets at least one layer.

    Raises:
        ConfigError: more stages than layers.
    """
    if num_stages > len(sizes):
        raise ConfigError(
            f"{num_stages} stages need at least as many layers, but the model has {len(sizes)}"
        )
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(sizes, middle)) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return _spread(_fill(sizes, low), num_stages)


def _fill(sizes: Sequence[int], capacity: int) -> list[int]:
    """Layers a stage when every stage takes as many as fit into `capacity`."""
    counts, load = [0], 0
    for size in sizes:
        if counts[-1] and load + size > capacity:
            counts.append(0)
            load = 0
        counts[-1] += 1
        load += size
    return counts


def _spread(counts: list[int], num_stages: int) -> list[int]:
    """Split stages of several layers until there are `num_stages`; no stage becomes larger."""
    while len(counts) < num_stages:
        index = max(range(len(counts)), key=counts.__getitem__)
        half = counts[index] // 2
        counts[index : index + 1] = [counts[index] - half, half]
    return counts
