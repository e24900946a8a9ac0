"""The memory that is predicted for each stage."""

from __future__ import annotations

from typing import Any

from rpcmp.pipelining.cost_model import predict
from rpcmp.pipelining.partition import HostProfile, StageHost
from rpcmp.tools.explain.model_summary import (
    LayerFacts,
    MemoryEstimate,
    ModelSummary,
    StageFacts,
    explain_stages,
)
from tests.support.graphs import chain_of
from tests.support.profiles import layer


def facts(layers: int, parameters: int, optimizer: int | None) -> StageFacts:
    return StageFacts(
        layers=[LayerFacts(name=f"layer{index}", parameters=1) for index in range(layers)],
        parameters=parameters,
        trained=parameters,
        foreign=[],
        foreign_parameters=0,
        foreign_bytes=0,
        memory=MemoryEstimate(4 * parameters, 8, 4 * parameters, optimizer),
    )


def inventory(*found: StageFacts, tied: list[list[str]] | None = None) -> ModelSummary:
    return ModelSummary(
        stages=list(found),
        parameters=sum(stage.parameters for stage in found),
        tied=tied or [],
        batches={},
        steps=1,
        unknown="",
        available_bytes=1000,
    )


def hosts(**changes: Any) -> list[StageHost]:
    layers = [layer(1.0, 100, 10, 1), layer(1.0, 200, 20, 2), layer(1.0, 400, 40, 4)]
    profile = HostProfile(layers=layers, base_bytes=1000, available_bytes=10_000)
    settings = {"limit_bytes": 5000, "num_microbatches": 4, "recompute": False} | changes
    return [StageHost(stage=f"stage{i}", profile=profile, held=2 - i, **settings) for i in range(2)]


def test_memory_follows_the_balance() -> None:
    """Counted and measured bytes together equal the memory by which `predict` chooses a balance."""
    config, measured = chain_of(2), hosts()
    counted = inventory(facts(2, 20, 300 - 2 * 80 - 8), facts(1, 30, 400 - 2 * 120 - 8))
    first, last = explain_stages(config, counted, measured)
    assert (first.memory.process, first.memory.activations) == (1000, 2 * 1 + 2 * 30)
    assert (last.memory.activations, last.in_flight) == (1 * 4 + 1 * 40, 1)
    predicted = predict(config, measured, [2, 1]).stages
    assert [stage.memory.total for stage in (first, last)] == [
        stage.memory_bytes for stage in predicted.values()
    ]
    assert first.memory.snapshots == 3 * (80 + 8 + 132)
    assert not first.memory.is_too_much
    assert explain_stages(config, counted, hosts(limit_bytes=1100))[0].memory.is_too_much
    kept = explain_stages(config, counted, hosts(recompute=True))[0].memory.activations
    assert kept == 2 * 1 + 30


def test_unknown_optimizer_state_is_the_rest_of_the_measured_state() -> None:
    counted = inventory(facts(2, 20, None), facts(1, 30, None))
    first, _ = explain_stages(chain_of(2), counted, hosts())
    assert first.memory.optimizer == 300 - 2 * 80 - 8


def test_unknown_parts_are_none_without_a_measurement() -> None:
    counted = inventory(facts(2, 20, None), facts(1, 30, 0))
    first, last = explain_stages(chain_of(2), counted, None)
    memory = first.memory
    assert (memory.process, memory.activations, memory.optimizer) == (None, None, None)
    assert (memory.total, memory.limit, memory.snapshots) == (168, 500, None)
    given = chain_of(2, stages=[{"memory": "1 MiB"}, {}])
    assert explain_stages(given, counted, None)[0].memory.limit == 2**20
    away = chain_of(2, stages=[{"addresses": ["a:1"]}, {"addresses": ["b:1"]}])
    assert explain_stages(away, counted, None, away.addresses)[1].memory.limit is None
    assert explain_stages(away, counted, None, away.addresses)[1].addresses == ["b:1"]
    assert last.memory.total == 248
