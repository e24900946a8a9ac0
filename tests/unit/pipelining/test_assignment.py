"""Assignments: the layers, limits and ranks of each worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpcmp.config import loader
from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.config.topology import DRIVER, member_name, member_names
from rpcmp.errors import ConfigError
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.assignment import Assignment, assign
from rpcmp.pipelining.schedule import InFlightLimits
from tests.support.graphs import workers
from tests.support.settings import setting


def chain(width: int = 6, **model: Any) -> Config:
    """Return a job of tests.zoo.models; its three layers have 5w, w(w + 1) and w + 1 parameters."""
    source = {"layers": "tests.zoo.models:layers", "kwargs": {"width": width}, **model}
    return parse_config({"loss": "torch.nn:MSELoss", "model": source})


BRANCHES = {
    "loss": "m:loss",
    "num_microbatches": 8,
    "stages": [
        {"name": "c", "module": "m:C", "inputs": ["a", "b"]},
        {"name": "a", "module": "m:A", "inputs": ["input"]},
        {"name": "b", "module": "m:B", "inputs": ["a"]},
    ],
}


def layers_of(config: Config) -> list[list[str]]:
    return [assignment.layers for assignment in assign(config)]


def test_a_balance_assigns_layers() -> None:
    assert layers_of(chain(balance=[2, 1])) == [["first", "middle"], ["last"]]


def test_the_default_balance_minimizes_the_largest_stage() -> None:
    assert layers_of(chain(width=6, num_stages=2)) == [["first"], ["middle", "last"]]
    assert layers_of(chain(width=2, num_stages=2)) == [["first"], ["middle", "last"]]
    assert layers_of(chain(num_stages=1)) == [["first", "middle", "last"]]


def test_named_stages_are_a_layer_each_in_the_configs_order() -> None:
    assignments = assign(parse_config(BRANCHES))
    assert [assignment.layers for assignment in assignments] == [["c"], ["a"], ["b"]]
    assert [assignment.stage_name for assignment in assignments] == ["c", "a", "b"]
    assert [assignment.stage_index for assignment in assignments] == [0, 1, 2]


@pytest.mark.parametrize(
    ("overrides", "limits"),
    [
        ({}, [(3, 3), (2, 2), (1, 1)]),
        (
            {"schedule": "zero-bubble", "max_in_flight": 6},
            [(5, 5), (3, 6, True, 2), (1, 6, True, 4)],
        ),
    ],
)
def test_limits_follow_the_schedule_the_graph_and_max_in_flight(
    overrides: dict[str, Any], limits: list[tuple[Any, ...]]
) -> None:
    config = parse_config({**BRANCHES, **overrides})
    of_a, of_b, of_c = (InFlightLimits(*each) for each in limits)
    assert cost_model.limits(config) == {"a": of_a, "b": of_b, "c": of_c}
    assert [assignment.limits for assignment in assign(config)] == [of_c, of_a, of_b]


@pytest.mark.parametrize(
    ("overrides", "of_c", "held", "in_flight"),
    [
        ({}, (1, 1), (8, 6, 3), 5),
        ({"max_in_flight": 7}, (1, 1), (6, 6, 3), 4),
        ({"schedule": "gpipe", "max_in_flight": 8}, (4, 4), (8, 8, 8), 6),
        ({"schedule": "zero-bubble", "max_in_flight": 3}, (1, 1, True), (3, 3, 3), 3),
        ({"microbatches_per_message": 100, "num_microbatches": 2}, (1, 1), (2, 2, 2), 2),
    ],
)
def test_schedules_count_bundles_if_micro_batches_share_a_message(
    overrides: dict[str, Any], of_c: tuple[Any, ...], held: tuple[int, ...], in_flight: int
) -> None:
    config = parse_config({**BRANCHES, "microbatches_per_message": 3, **overrides})
    assert cost_model.limits(config)["c"] == InFlightLimits(*of_c)
    assert cost_model.held(config) == dict(zip("abc", held, strict=True))
    assert cost_model.in_flight(config) == in_flight


def test_a_message_must_not_hold_more_than_may_be_in_flight() -> None:
    config = parse_config({**BRANCHES, "microbatches_per_message": 3, "max_in_flight": 2})
    with pytest.raises(
        ConfigError, match="max_in_flight = 2, but a message has 3 micro-batches by micro"
    ):
        cost_model.limits(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (chain(balance=[1, 1]), "adds up to 2, but the model has 3 layers: first, middle, last"),
        (chain(num_stages=2, balance="auto"), "has to be measured"),
        (chain(num_stages=4), "4 stages need at least as many layers, but the model has 3"),
        (chain(layers="tests.zoo.models:raising", kwargs={}), "failed: ValueError"),
        (chain(layers="tests.zoo.models:no_such"), "does not import"),
        (
            parse_config({**BRANCHES, "stages": [{"module": "m:M", "device": "gpu"}]}),
            "stage 'stage0': device = 'gpu': .* one of cpu, cuda",
        ),
    ],
)
def test_an_impossible_plan_is_an_error_with_its_reason(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign(config)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"optimizer": {"callable": "torch.optim:Adm"}}, "optimizer of stage 'stage0' = 'torch"),
        ({"optimizer": {"betas": [0.9, 0.99]}}, "optimizer of stage 'stage0' = 'torch.optim:SGD'"),
        (
            {"scheduler": {"callable": "torch.optim.lr_scheduler:StepLR"}},
            "scheduler of stage 'stage0' = .* failed: TypeError",
        ),
    ],
)
def test_options_of_a_stage_are_checked_when_it_is_assigned(
    stage: dict[str, Any], message: str
) -> None:
    job = {"loss": "torch.nn:MSELoss", "model": {"layers": "tests.zoo.models:layers"}}
    with pytest.raises(ConfigError, match=message):
        assign(parse_config({**job, "stages": [stage]}))


def test_an_optimizer_that_takes_matrices_only_may_have_stages_of_them() -> None:
    model = {"layers": "tests.zoo.models:matrices", "num_stages": 2}
    config = parse_config(
        {"loss": "torch.nn:MSELoss", "model": model, "optimizer": "torch.optim:Muon"}
    )
    assert len(assign(config)) == 2


@pytest.mark.parametrize(
    "config", [chain(num_stages=3), parse_config(BRANCHES)], ids=["chain", "graph"]
)
def test_an_assignment_survives_the_journey_to_its_worker(config: Config) -> None:
    for assignment in assign(config):
        assert Assignment.model_validate_json(assignment.model_dump_json()) == assignment


def test_ranks_follow_the_config_and_the_driver_comes_last() -> None:
    assert member_names(workers("a", "driver")) == [member_name("a"), member_name("driver"), DRIVER]
    everybody = member_names(workers("a", "driver", replicas=2))
    assert everybody == ["a:0", "a:1", "driver:0", "driver:1", DRIVER]


def test_a_worker_has_room_for_all_settings_that_may_come() -> None:
    stages = [{"module": "zoo:First"}, {"module": "zoo:Join"}]
    config = loader.parse_config({"stages": stages, "loss": "torch.nn:MSELoss"})
    first, _ = assign(config, [setting(9, "gpipe"), setting(9, "1f1b", 5)])
    arrived = Assignment.model_validate_json(first.model_dump_json())
    assert (arrived.limits.open, arrived.in_flight, arrived.may_split) == (2, 11, False)


def test_factories_know_the_place_of_init_when_they_are_sized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sized_by_init.py").write_text("""
import rpcmp
from torch import nn

def layers():
    return [(name, lambda: nn.Linear(len(rpcmp.init_path()), 1)) for name in "ab"]
""")
    monkeypatch.syspath_prepend(tmp_path)
    given = {"model": {"layers": "sized_by_init:layers", "num_stages": 2}, "init": "nowhere"}
    loss = {"loss": "torch.nn:MSELoss", "optimizer": {"callable": "torch.optim:SGD"}}
    found = assign(parse_config({**loss, **given}))
    assert [one.layers for one in found] == [["a"], ["b"]]
