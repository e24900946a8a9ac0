"""Losses that count tokens: a mini-batch's mean, however it is cut and wherever it is loaded."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, FactoryError, RpcmpError
from tests.support.chains import PADDED
from tests.support.localgroup import local_group, require_same_bits
from tests.support.localpipeline import local_pipeline
from tests.support.nearness import assert_near
from tests.support.processes import JobFolder
from tests.zoo import tokenized

CAUSAL = """
schedule = "zero-bubble"
loss = "rpcmp.losses:causal_lm"
num_microbatches = 4
[model]
layers = "tokenized:tagger"
balance = [1, 1, 1]
[data]
train = { callable = "tokenized:padded", kwargs = { shift = 1 } }
batch_size = 11
"""


def config_of(job: JobFolder, text: str, *overrides: str) -> Config:
    return loader.load_config(job.config(text), ["steps=4", *overrides])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("at", ["driver", "stage"])
def test_weighted_losses_give_the_bits_of_one_process(
    job: JobFolder, schedule: str, at: str
) -> None:
    """The first mini-batch has five samples in which nothing counts: a whole micro-batch."""
    found = config_of(job, PADDED, f"schedule={schedule}", f"data.at={at}")
    assert len(require_same_bits(found).losses) == 4


@pytest.mark.parametrize(
    "overrides",
    [
        ["stages.1.replicas=2"],
        ["stages.1.replicas=3", "data.at=stage"],
        ["microbatches_per_message=2"],
        ["stages.1.recompute=true"],
        ["max_grad_norm=0.1"],
        ["autocast=float16", "loss_scaling={ initial = 128.0 }"],
    ],
)
def test_weights_go_with_everything_else(job: JobFolder, overrides: list[str]) -> None:
    require_same_bits(config_of(job, PADDED, "num_microbatches=5", *overrides))


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_a_loss_of_ours_brings_its_weight(job: JobFolder, at: str) -> None:
    require_same_bits(config_of(job, CAUSAL, f"data.at={at}"))


@pytest.mark.parametrize("at", ["driver", "stage"])
@pytest.mark.parametrize("count", [3, 8])
def test_the_gradient_is_that_of_the_whole_mini_batch(job: JobFolder, at: str, count: int) -> None:
    """With SGD and a learning rate of one, a step is the gradient."""
    states, losses = [], []
    for num_microbatches in (1, count):
        cut = f"num_microbatches={num_microbatches}"
        with local_group(config_of(job, PADDED, "steps=1", cut, f"data.at={at}")) as local:
            run = local.train(evaluate=True)
            (evaluation,) = local.of("eval")
            states.append(run.state)
            losses.append([*run.losses, evaluation["loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, value in states[0].items():
        assert_near(states[1][name], value, 1e-6)


def test_an_evaluation_is_the_mean_of_what_counts(job: JobFolder) -> None:
    inputs, targets = tokenized.padded(23).tensors
    with local_pipeline(config_of(job, PADDED)) as pipeline:
        state = pipeline.state_dict()
        found = pipeline.evaluate(inputs, targets)
        nothing = pipeline.evaluate(inputs[:5], targets[:5])
        both = pipeline.evaluate(inputs[:8], targets[:8])
    model = nn.Sequential(OrderedDict((name, make()) for name, make in tokenized.tagger()))
    model.load_state_dict(state)
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert found.loss == pytest.approx(float(expected), rel=1e-6)
    assert (found.num_samples, found.weight) == (23, float((targets != -100).sum()))
    assert nothing.weight == 0
    assert math.isnan(nothing.loss)
    assert both.weight == float((targets[:8] != -100).sum())


def test_a_pipeline_goes_on_after_a_mini_batch_without_any_weight(job: JobFolder) -> None:
    inputs, targets = tokenized.padded(15).tensors
    with local_pipeline(config_of(job, PADDED)) as pipeline:
        with pytest.raises(ConfigError, match="step 1: the mini-batch weighs nothing"):
            pipeline.train_step(inputs[:5], targets[:5])
        first = pipeline.train_step(inputs[5:], targets[5:])
        state = pipeline.state_dict()
    with local_pipeline(config_of(job, PADDED)) as pipeline:
        assert pipeline.train_step(inputs[5:], targets[5:]) == first
        assert all(torch.equal(state[name], v) for name, v in pipeline.state_dict().items())


def error_of(config: Config) -> RpcmpError:
    with local_group(config) as local, pytest.raises(RpcmpError) as raised:
        local.train(evaluate=True)
    return raised.value


@pytest.mark.parametrize("at", ["driver", "stage"])
def test_a_mini_batch_without_any_weight_is_an_error_that_names_it(job: JobFolder, at: str) -> None:
    error = error_of(config_of(job, PADDED, "data.batch_size=5", f"data.at={at}"))
    assert isinstance(error, ConfigError)
    where = {"driver": "step 1", "stage": "data.train, mini-batch 1 of epoch 1"}[at]
    assert str(error).startswith(
        f"{where}: the mini-batch weighs nothing, so there is nothing to learn from it: "
        "loss_weight = 'rpcmp.losses:tokens' gives 0 for each of its 3 micro-batches"
    )


@pytest.mark.parametrize("at", ["driver", "stage"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("failing", "failed for targets int64[4, 8]: RuntimeError: cannot weigh 4"),
        ("negative", "gives -1.0: it has to give one number that is not negative"),
    ],
)
def test_a_weight_that_fails_is_an_error_that_names_it(
    job: JobFolder, at: str, name: str, text: str
) -> None:
    found = config_of(job, PADDED, f"loss_weight=tokenized:{name}", f"data.at={at}")
    error = error_of(found)
    assert isinstance(error, FactoryError | ConfigError)
    assert f"micro-batch 0: loss_weight = 'tokenized:{name}' {text}" in str(error)


def test_a_weight_that_does_not_import_fails_before_anything_starts(job: JobFolder) -> None:
    with (
        pytest.raises(FactoryError, match="loss_weight = 'tokenized:pading' does not import"),
        local_group(config_of(job, PADDED, "loss_weight=tokenized:pading")),
    ):
        pass


def test_a_loss_that_adds_up_takes_no_weight(job: JobFolder) -> None:
    text = PADDED.replace('"tokenized:token_loss"', '"tokenized:Total"')
    with (
        pytest.raises(RpcmpError, match=r"loss = 'tokenized:Total' adds up over samples"),
        local_group(config_of(job, text)),
    ):
        pass
