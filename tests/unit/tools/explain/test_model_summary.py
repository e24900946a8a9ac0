"""The summary of a job's model on the meta device, compared with the built and trained model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, RpcmpError
from rpcmp.pipelining import layers, pytree
from rpcmp.tools.explain.model_summary import ModelSummary, StageFacts, summarize_model
from rpcmp.worker.profiler import storage_sizes
from tests.support.places import ZOO

LANGUAGE = {
    "loss": "zoo:token_loss",
    "steps": 7,
    "optimizer": {"callable": "torch.optim:AdamW", "kwargs": {"lr": 0.01, "amsgrad": True}},
    "tied": [["embed.weight", "head.weight"]],
    "model": {"layers": "zoo:language", "balance": [1, 2, 1]},
    "data": {"train": "zoo:tokens", "batch_size": 12},
}

BLOCKS = {
    "loss": "torch.nn:MSELoss",
    "epochs": 3,
    "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.01, "momentum": 0.9}},
    "model": {"layers": "zoo:mlp", "balance": [1, 3]},
    "stages": [{"frozen": True}, {}],
    "data": {"train": "zoo:regression", "test": "zoo:regression", "batch_size": 16},
}

JOINED = {
    "loss": "torch.nn:MSELoss",
    "steps": 2,
    "stages": [
        {"name": "left", "module": "zoo:Encoder", "inputs": ["input"]},
        {"name": "right", "module": "zoo:Encoder", "inputs": ["input"], "replicas": 2},
        {
            "name": "join",
            "module": "zoo:Join",
            "kwargs": {"inputs": 2},
            "inputs": ["left", "right"],
        },
    ],
    "data": {"train": "zoo:regression", "batch_size": 10},
}


@pytest.fixture(autouse=True)
def _zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ZOO))


def config(values: dict[str, Any]) -> Config:
    return parse_config(values).with_folder(ZOO)


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(storage_sizes(tensors).values())


def trained(job: Config, index: int, found: StageFacts) -> None:
    """Build a stage, train it for one step, and compare its tensors with the summary."""
    names = [layer.name for layer in found.layers]
    modules = layers.build_layers(job, index, names)
    assert [layer.parameters for layer in found.layers] == [
        sum(parameter.numel() for parameter in module.parameters()) for module in modules.values()
    ]
    model = nn.ModuleDict(dict(modules))
    if job.stage(index).frozen:
        model.requires_grad_(False)
    parameters = dict(model.named_parameters())
    assert found.parameters == sum(value.numel() for value in parameters.values())
    assert found.memory.parameters == bytes_of(list(parameters.values()))
    assert found.memory.buffers == bytes_of(list(model.buffers()))
    learning = {name: value for name, value in parameters.items() if value.requires_grad}
    for value in learning.values():
        value.grad = torch.ones_like(value)
    assert found.memory.gradients == bytes_of(
        [v.grad for v in learning.values() if v.grad is not None]
    )
    own = [value for name, value in learning.items() if name not in job.tied_to]
    assert found.trained == sum(value.numel() for value in own)
    if not own:
        assert found.memory.optimizer == 0
        return
    module, _, name = job.optimizer.callable.partition(":")
    optimizer = getattr(sys.modules[module], name)(own, **job.optimizer.kwargs)
    optimizer.step()
    assert found.memory.optimizer == bytes_of(pytree.tensors(optimizer.state_dict()))


@pytest.mark.parametrize("values", [LANGUAGE, BLOCKS, JOINED])
def test_counts_equal_the_built_model_and_its_state_after_a_step(values: dict[str, Any]) -> None:
    job = config(values)
    found = summarize_model(job)
    assert len(found.stages) == job.num_stages
    for index, stage in enumerate(found.stages):
        trained(job, index, stage)


def test_a_tied_parameter_counts_once_in_the_model_and_at_its_owner() -> None:
    found = summarize_model(config(LANGUAGE))
    embed, _, head = found.stages
    assert found.tied == [["stage0", "stage2"]]
    assert (embed.foreign, head.foreign) == ([], ["head.weight"])
    assert (head.parameters, head.trained, head.foreign_parameters) == (88, 0, 88)
    assert found.parameters == sum(stage.parameters for stage in found.stages) - 88


def test_steps_equal_the_steps_of_a_run() -> None:
    counted, epochs = summarize_model(config(LANGUAGE)), summarize_model(config(BLOCKS))
    assert (counted.steps, counted.batches) == (7, {"train": 4})
    assert (epochs.steps, epochs.batches) == (12, {"train": 4, "test": 4})


class Curious(nn.Module):
    """A layer that reads its weights while it is built, which fails on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.norm = float(self.linear.weight.detach().norm())


def curious() -> list[tuple[str, Callable[[], nn.Module]]]:
    return [("curious", Curious)]


class Stubborn(torch.optim.SGD):
    """An optimizer that reads its gradients, which fails on the meta device."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                float(parameter.grad.sum())
        return super().step(closure)


def test_a_model_that_the_meta_device_cannot_hold_is_built() -> None:
    values = BLOCKS | {
        "model": {"layers": f"{__name__}:curious", "balance": [1]},
        "stages": [],
        "optimizer": f"{__name__}:Stubborn",
    }
    (stage,) = summarize_model(config(values)).stages
    assert stage.parameters == 9
    assert stage.memory.optimizer is None


def test_steps_are_unknown_if_only_the_stages_have_the_data() -> None:
    values = BLOCKS | {"data": {"train": "zoo:nowhere", "at": "stage"}}
    with pytest.raises(RpcmpError, match="zoo:nowhere"):
        summarize_model(config(values))
    found: ModelSummary = summarize_model(config(values), is_here=False)
    assert (found.steps, found.batches) == (None, {})
    assert "zoo:nowhere" in found.unknown
    assert summarize_model(config(values | {"epochs": None, "steps": 5}), is_here=False).steps == 5


def test_a_job_that_a_run_would_refuse_is_refused() -> None:
    wrong = BLOCKS | {"model": {"layers": "zoo:mlp", "balance": [1, 1]}}
    with pytest.raises(ConfigError, match="adds up to 2, but the model has 4 layers"):
        summarize_model(config(wrong))
    without = {key: value for key, value in BLOCKS.items() if key != "data"}
    with pytest.raises(ConfigError, match=r"no \[data\] section"):
        summarize_model(config(without))
    with pytest.raises(ConfigError, match="max_in_flight = 2: gpipe holds all 4"):
        summarize_model(config(BLOCKS | {"schedule": "gpipe", "max_in_flight": 2}))
