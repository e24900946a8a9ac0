"""Evaluations: they do not change the training, and their errors appear before the first step."""

from __future__ import annotations

import pytest
import torch

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from tests.support.localgroup import LocalGroup, local_group
from tests.support.processes import JobFolder

AT = pytest.mark.parametrize("at", ["driver", "stage"])

EVALUATED = """
steps = 12
evaluate_every_steps = 2
[model]
layers = "zoo:mlp"
num_stages = 2
[metrics]
error = "measures:error"
fit = { callable = "measures:Fit" }
[data]
train = "zoo:regression"
test = { callable = "zoo:regression", kwargs = { samples = 23 } }
batch_size = 10
"""


def refused(config: Config, which: str = "first") -> str:
    """Return the error of a run that fails to evaluate a mini-batch before the first step."""
    with local_group(config) as local:
        with pytest.raises(ConfigError) as raised:
            local.train(evaluate=True)
        assert not local.of("step")
    message = str(raised.value)
    assert f"tried on the {which} mini-batch of data.test before the first step" in message
    return message


def test_evaluating_does_not_change_training(job: JobFolder) -> None:
    config = loader.load_config(job.config(EVALUATED))
    with local_group(config) as local:
        evaluated = local.train(evaluate=True)
        assert [event["step"] for event in local.of("eval")] == [2, 4, 6, 8, 10, 12]
        assert all(event["fit.samples"] == 23 for event in local.of("eval"))
    with local_group(config) as local:
        trained = local.train()
        assert local.of("eval") == []
    assert trained.losses == evaluated.losses
    assert all(torch.equal(trained.state[name], v) for name, v in evaluated.state.items())


def evaluations(local: LocalGroup) -> list[tuple[object, ...]]:
    """Return the exact results of all evaluations."""
    return [tuple(sorted(event.items())) for event in local.of("eval")]


def test_an_evaluation_is_the_same_for_every_cut_and_wherever_samples_are_loaded(
    job: JobFolder,
) -> None:
    found = []
    for override in ("model.num_stages=1", "model.num_stages=3", "data.at=stage"):
        with local_group(loader.load_config(job.config(EVALUATED), [override])) as local:
            local.train(evaluate=True)
            found.append(evaluations(local))
    assert found[0] == found[1] == found[2] != []


def test_an_unknown_metric_key_fails_before_the_first_step(
    job: JobFolder,
) -> None:
    stopping = 'early_stopping={metric="fit.mse"}'
    message = (
        "early_stopping.metric = 'fit.mse': an evaluation gives loss, error, fit.r2, fit.samples"
    )
    with local_group(loader.load_config(job.config(EVALUATED), [stopping])) as local:
        with pytest.raises(ConfigError, match=message):
            local.train(evaluate=True)
        assert not local.of("step")


@AT
@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("torch.nn.functional:cosine_similarity", "ValueError: only one element tensors"),
        ("torch.nn.functional:nll_loss", "nll_loss"),
    ],
)
def test_a_broken_metric_fails_before_the_first_step(
    job: JobFolder, at: str, metric: str, message: str
) -> None:
    wrong = [f"metrics.wrong={metric}", f"data.at={at}"]
    assert message in refused(loader.load_config(job.config(EVALUATED), wrong))


@AT
def test_a_broken_evaluation_without_metrics_fails_before_the_first_step(
    job: JobFolder, at: str
) -> None:
    """The samples have 7 features instead of 8."""
    path = job.config(f"""
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        [data]
        train = "zoo:regression"
        test = {{ callable = "torch:ones", kwargs = {{ size = [20, 7] }} }}
        at = "{at}"
    """)
    assert "mat1 and mat2 shapes cannot be multiplied" in refused(loader.load_config(path))


@AT
def test_an_evaluation_whose_last_mini_batch_is_too_small_fails_before_the_first_step(
    job: JobFolder, at: str
) -> None:
    """Batch normalization without running statistics needs two samples in evaluations as well."""
    path = job.config(f"""
        [model]
        layers = "untrained:layers"
        balance = [1, 1]
        [data]
        train = {{ callable = "zoo:regression", kwargs = {{ samples = 16 }} }}
        test = {{ callable = "zoo:regression", kwargs = {{ samples = 17 }} }}
        batch_size = 8
        at = "{at}"
    """)
    message = refused(loader.load_config(path), "last")
    assert "Expected more than 1 value per channel" in message


def test_a_metric_that_needs_more_than_one_mini_batch_is_a_warning(job: JobFolder) -> None:
    path = job.config(EVALUATED.replace("steps = 12", "steps = 3"))
    with local_group(loader.load_config(path, ["metrics.late=untrained:Late"])) as local:
        found = local.train(evaluate=True)
        (text,) = [event["text"] for event in local.of("warning")]
        assert local.of("eval")[-1]["late"] == 1 / 13
    assert text.startswith(
        "metrics.late failed in compute(): ZeroDivisionError: division by zero; tried on one "
        "mini-batch of data.test before the first step."
    )
    assert "\n" not in text
    with local_group(loader.load_config(path)) as local:
        assert local.train().losses == found.losses
