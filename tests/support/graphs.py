"""Graphs of stages for hypothesis, and a small config."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rpcmp.config import topology
from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.config.topology import Graph, Member


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph of stages that read earlier ones; the last stage reads all outputs without a
    reader.
    """
    count = draw(st.integers(1, 6))
    inputs: dict[str, list[str]] = {}
    for index in range(count):
        earlier = draw(st.sets(st.integers(0, index - 1))) if index else set()
        if index == count - 1:
            read = {name for references in inputs.values() for name in references}
            earlier |= {i for i in range(index) if f"s{i}" not in read}
        inputs[f"s{index}"] = [f"s{i}" for i in sorted(earlier)] or ["input"]
    return topology.build_graph(inputs)


def workers(*stages: str, replicas: int = 1) -> list[Member]:
    """Return the workers of stages with equally many replicas."""
    return [
        Member(stage, index, replica, replicas)
        for index, stage in enumerate(stages)
        for replica in range(replicas)
    ]


def chain_of(num_stages: int, **more: Any) -> Config:
    """Return a job with a chain of `num_stages` stages: two, unless `more` changes the model."""
    config: Config = parse_config(
        {"loss": "m:loss", "model": {"layers": "m:layers", "balance": [2, 1]}, **more}
    )
    assert config.num_stages == num_stages
    return config
