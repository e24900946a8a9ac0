"""The bits of replicated stages, which equal one process for every number of replicas."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, StageError
from tests.support.localgroup import local_group, require_same_bits
from tests.support.localpipeline import local_pipeline
from tests.support.nearness import assert_near
from tests.support.places import ZOO
from tests.support.processes import JobFolder
from tests.support.replicated import ALONE, MIXED, PIPELINES
from tests.zoo import zoo

BUNDLES = "microbatches_per_message=2"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (MIXED, ["schedule=gpipe"]),
        (MIXED, ["schedule=1f1b"]),
        (MIXED, ["schedule=zero-bubble"]),
        (PIPELINES, []),
        (PIPELINES, [BUNDLES]),
        (PIPELINES, ["num_microbatches=1"]),
        (ALONE, []),
        (ALONE, ["num_microbatches=2"]),  # one replica is idle
    ],
)
def test_replicas_give_the_bits_of_one_process(
    job: JobFolder, text: str, overrides: list[str]
) -> None:
    found = require_same_bits(loader.load_config(job.config(text), ["steps=6", *overrides]))
    assert len(found.losses) == 6


def test_a_resumed_run_of_replicas_has_the_bits_of_an_uninterrupted_one(
    job: JobFolder, tmp_path: Path
) -> None:
    path = job.config(PIPELINES)
    whole = require_same_bits(loader.load_config(path, ["steps=6"]))
    with local_group(loader.load_config(path, ["steps=4"])) as local:
        local.train()
        saved = local.save(tmp_path / "kept")
    with local_group(loader.load_config(path, ["steps=6"]), saved) as local:
        resumed = local.train()
        local.group.parameters_sha256()  # fails if replicas differ
    assert resumed.losses == whole.losses[4:]
    assert all(torch.equal(resumed.state[name], value) for name, value in whole.state.items())


@pytest.mark.parametrize(("first", "second"), [(3, 1), (1, 2)])
def test_a_run_resumes_with_another_number_of_replicas(
    job: JobFolder, tmp_path: Path, first: int, second: int
) -> None:
    """Another number of replicas sums in another order, so the last bits differ."""
    path = job.config(PIPELINES)
    with local_group(loader.load_config(path, ["steps=6"])) as local:
        whole = local.train()
    with local_group(loader.load_config(path, ["steps=4"])) as local:
        local.train()
        saved = local.save(tmp_path / "kept")
    other = ["steps=6", f"stages.0.replicas={first}", f"stages.1.replicas={second}"]
    with local_group(loader.load_config(path, other), saved) as local:
        assert local.train().losses == pytest.approx(whole.losses[4:], rel=1e-4)
        assert len(local.workers) == first + second


# Errors


def test_replicas_of_other_shapes_are_refused_before_the_first_step(job: JobFolder) -> None:
    config = loader.load_config(job.config(ALONE.replace("zoo:mlp", "zoo:wider")))
    with pytest.raises(ConfigError) as refused, local_group(config):
        pass
    message = str(refused.value)
    assert "replicas 0 and 1 of stage 'stage0' are not the same model: hidden.weight is" in message
    assert "install the same on their hosts" in message


# Programs


def test_accumulated_gradients_are_all_reduced_once() -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(OrderedDict((name, build()) for name, build in zoo.wide()))
    batches = [(torch.randn(8, zoo.FEATURES), torch.randn(8, 1)) for _ in range(3)]
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        nn.functional.mse_loss(expected(inputs), targets).backward()

    data = {
        "model": {"layers": "zoo:wide"},
        "stages": [{"replicas": 2}],
        "loss": "torch.nn:MSELoss",
        "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.1}},
        "num_microbatches": 4,
    }
    config = Config.model_validate(data).with_folder(ZOO)
    with local_pipeline(config) as pipeline:
        pipeline.load_state_dict(expected.state_dict())
        for inputs, targets in batches[:2]:
            pipeline.forward_backward(inputs, targets)
            backward(inputs, targets)
        norm = pipeline.optimizer.clip_grad_norm_(0.01)  # uses the sum over replicas
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(expected.parameters(), 0.01).item())
        pipeline.forward_backward(*batches[2])  # adds to the gradients
        backward(*batches[2])
        pipeline.optimizer.step()
        optimizer.step()
        for name, value in pipeline.state_dict().items():
            assert_near(value, expected.state_dict()[name])
        pipeline.parameters_sha256()  # fails if replicas differ
        pipeline.forward_backward(*batches[0])
        with pytest.raises(StageError):
            pipeline.predict(torch.randn(8, zoo.FEATURES + 1))
        pipeline.optimizer.step()  # the gradients of the first call are still there


def test_sparse_gradients_that_would_have_to_be_summed_are_refused_at_once() -> None:
    data = {
        "model": {"layers": "zoo:sparse", "kwargs": {"says_so": True}},
        "stages": [{"replicas": 2}],
        "loss": "zoo:token_loss",
    }
    config = Config.model_validate(data).with_folder(ZOO)
    with pytest.raises(StageError, match=r"'embed\.weight' gets sparse gradients"):
        local_pipeline(config).__enter__()


def test_a_failed_all_reduce_is_an_error_and_the_pipeline_stays_usable() -> None:
    data = {
        "model": {"layers": "zoo:sparse"},
        "stages": [{"replicas": 2}],
        "loss": "zoo:token_loss",
        "num_microbatches": 2,
    }
    tokens = torch.randint(11, (4, 6))
    with local_pipeline(Config.model_validate(data).with_folder(ZOO)) as pipeline:
        for _ in range(2):
            with pytest.raises(StageError, match="sparse gradients cannot be summed"):
                pipeline.train_step(tokens, tokens)
            assert pipeline.evaluate(tokens, tokens).num_samples == 4
