"""Layers that count outside of themselves train as in plain PyTorch, or are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from rpcmp.config import importing, loader
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, JobError
from tests.support import plain
from tests.support.localgroup import local_group
from tests.support.processes import JobFolder
from tests.zoo import counting

JOB = """
steps = 3
num_microbatches = 1
loss = "torch.nn:MSELoss"
optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.05 } }
[model]
layers = "tests.zoo.counting:layers"
[data]
train = "tests.zoo.surprises:pairs"
batch_size = 8
shuffle = false
"""


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    counting.reset()
    yield
    counting.reset()


def configured(job: JobFolder, kind: str, stages: int, *more: str) -> Config:
    own = f'model.kwargs={{ kind = "{kind}" }}', f"model.num_stages={stages}"
    return loader.load_config(job.config(JOB), [*own, *more])


def require_plain(config: Config, kind: str, layers: Any = counting.layers) -> None:
    """Check a run that evaluates against a plain loop that does not."""
    assert config.data is not None
    net = nn.Sequential(*(make() for _, make in layers(kind)))
    data = importing.create(config.data.train, "data.train")
    loss = importing.load_function(config.loss, "loss")
    expected = plain.train(net, loss, plain.mini_batches(data))
    counting.reset()
    with local_group(config) as local:
        trained = local.train(evaluate=True)
    assert plain.close(trained.losses, expected)


EVALUATED = ["evaluate_every_steps=1", 'data.test="tests.zoo.surprises:pairs"']


@pytest.mark.parametrize("kind", ["global", "class", "cache"])
def test_layers_of_one_stage_count_as_one_process_does(job: JobFolder, kind: str) -> None:
    require_plain(configured(job, kind, 1, *EVALUATED), kind)


def test_a_position_in_an_iterator_that_nobody_sees_is_refused(job: JobFolder) -> None:
    refused = "the forward gives something else the second time"
    with (
        local_group(configured(job, "cycle", 1)) as local,
        pytest.raises(JobError, match=refused),
    ):
        local.train()


def test_a_cache_in_each_process_is_no_count(job: JobFolder) -> None:
    require_plain(configured(job, "cache", 3, *EVALUATED), "cache")


def test_a_count_on_which_nothing_depends_is_told(
    job: JobFolder, caplog: pytest.LogCaptureFixture
) -> None:
    require_plain(configured(job, "logged", 3), "logged")
    assert "tests.zoo.counting:calls counts in each stage by itself" in caplog.text


WARMING = 'loss="tests.zoo.counting:warming"'


@pytest.mark.parametrize(
    ("kind", "more", "name"),
    [
        ("global", [], "tests.zoo.counting:calls"),
        ("class", [], "tests.zoo.counting:Counting.seen"),
        ("warmth", [WARMING], "tests.zoo.counting:warmth"),
    ],
)
def test_what_stages_would_count_each_alone_is_refused(
    job: JobFolder, kind: str, more: list[str], name: str
) -> None:
    refused = f"both use '{name}', which changes with each step: each process has its own"
    with (
        local_group(configured(job, kind, 3, *more)) as local,
        pytest.raises(ConfigError, match=refused),
    ):
        local.train()


BORROWING = 'model.layers="tests.zoo.counting:borrowing"'


OF_FIRST = "a layer of this stage reads '{}', which the layer 'first'"


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("as it is", OF_FIRST.format("middle.others.0.weight")),
        ("detached", OF_FIRST.format("middle.others.0.weight")),
        ("kept", OF_FIRST.format("middle.others")),
        ("given", OF_FIRST.format("middle.others")),
        ("global", OF_FIRST.format("tests.zoo.counting:REGISTRY.first.weight")),
        ("statistics", "both use \"what 'first' and 'middle' share\", which changes with each"),
    ],
)
def test_a_weight_of_another_layer_is_trained_in_one_stage_alone(
    job: JobFolder, kind: str, refused: str
) -> None:
    require_plain(configured(job, kind, 1, BORROWING), kind, counting.borrowing)
    with (
        pytest.raises((JobError, ConfigError), match=refused),
        local_group(configured(job, kind, 3, BORROWING)) as local,
    ):
        local.train()


def test_a_weight_that_nobody_finds_is_found_by_the_graph(job: JobFolder) -> None:
    refused = r"outputs depend on parameters that no layer of this stage has.*shape \[4, 4\]"
    with (
        pytest.raises(JobError, match=refused),
        local_group(configured(job, "found", 3, BORROWING)) as local,
    ):
        local.train()


def test_a_weight_that_is_hidden_and_moves_is_refused(job: JobFolder) -> None:
    refused = "the forward changes 'middle.others.0.weight', a parameter of a module that is none"
    config = configured(job, "moving", 1, BORROWING)
    with local_group(config) as local, pytest.raises(JobError, match=refused):
        local.train()


SHARING = 'model.layers="tests.zoo.counting:sharing"'


def test_an_object_that_two_layers_get_is_one_in_one_stage_alone(job: JobFolder) -> None:
    require_plain(configured(job, "counting", 1, SHARING), "counting", counting.sharing)
    require_plain(configured(job, "constant", 3, SHARING), "constant", counting.sharing)
    refused = "both use \"what 'first' and 'middle' share\", which changes with each step"
    with (
        local_group(configured(job, "counting", 3, SHARING)) as local,
        pytest.raises(ConfigError, match=refused),
    ):
        local.train()


def test_several_micro_batches_would_count_more_often(job: JobFolder) -> None:
    config = configured(job, "global", 1, "num_microbatches=4")
    with local_group(config) as local, pytest.raises(ConfigError, match="or a layer mixes"):
        local.train()
