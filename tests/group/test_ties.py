"""Parameters that several stages share: one gradient, one optimizer state, one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.driver.process import plan_job
from rpcmp.errors import ConfigError, StageError
from rpcmp.rpc import tensors
from rpcmp.tools.verification import ComparedRun
from tests.support.localgroup import local_group, require_same_bits
from tests.support.localpipeline import local_pipeline
from tests.support.places import ZOO
from tests.support.processes import JobFolder
from tests.support.tiedjobs import BODY, REPLICAS


def sha256(run: ComparedRun) -> str:
    return tensors.parameters_sha256(run.state)


def test_tied_weights_give_the_bits_of_one_process_under_every_balance(
    job: JobFolder,
) -> None:
    path = job.config(BODY)
    cut = require_same_bits(loader.load_config(path))
    whole = require_same_bits(loader.load_config(path, ["model.balance=[4]"]))
    assert (len(cut.losses), len(cut.state)) == (6, 6)  # the shared tensor occurs twice
    assert sha256(cut) == sha256(whole)
    with local_group(loader.load_config(path, ["tied=[]"])) as local:
        assert sha256(local.train()) != sha256(cut)


def test_a_parameter_group_matches_a_tied_weight_by_its_second_name(job: JobFolder) -> None:
    path = job.config(BODY)
    three = ["steps=3", 'optimizer.groups=[{match=["head.weight"],lr=0.5}]']
    cut = require_same_bits(loader.load_config(path, three))
    whole = require_same_bits(loader.load_config(path, [*three, "model.balance=[4]"]))
    plain = require_same_bits(loader.load_config(path, ["steps=3"]))
    assert (len(cut.losses), len(cut.state)) == (3, 6)
    assert sha256(cut) == sha256(whole) != sha256(plain)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_tied_weights_give_the_bits_of_one_process_under_every_schedule_and_with_replicas(
    job: JobFolder, schedule: str
) -> None:
    path = job.config(BODY + REPLICAS)
    assert len(require_same_bits(loader.load_config(path, [f"schedule={schedule}"])).losses) == 6


def program(**more: Any) -> Config:
    """Return a job of two stages that share a weight, for a program that supplies its batches."""
    data = {
        "model": {"layers": "zoo:language", "balance": [2, 2]},
        "loss": "zoo:token_loss",
        "tied": [["embed.weight", "head.weight"]],
        "num_microbatches": 2,
    }
    return Config.model_validate({**data, **more}).with_folder(ZOO)


def test_a_tied_weight_is_one_parameter_to_the_library() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(11, (4, 6))
    with local_pipeline(program()) as pipeline:
        state = pipeline.state_dict()
        assert state["head.weight"] is state["embed.weight"]
        state["embed.weight"].fill_(0.0)
        pipeline.load_state_dict(state)
        assert torch.equal(pipeline.predict(tokens), torch.zeros(4, 6, 11))  # of both stages
        pipeline.forward_backward(tokens, tokens)
        pipeline.optimizer.zero_grad()
        assert pipeline.optimizer.clip_grad_norm_(1.0) == 0.0


# Errors


def test_the_library_can_read_the_model_after_an_owners_optimizer_failed() -> None:
    """The owner's neighbours wait for the parameter's new value in the call that fails."""
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    stages = [{"optimizer": "zoo:TroubledSGD"}, {}]
    with local_pipeline(program(stages=stages, recovery={"enabled": False})) as pipeline:
        pipeline.forward_backward(tokens, tokens)
        pipeline.optimizer.step()
        pipeline.forward_backward(tokens, tokens)
        with pytest.raises(StageError, match="'stage0' failed in optimizer at step 2: ValueError"):
            pipeline.optimizer.step()
        assert "embed.weight" in pipeline.state_dict()


@pytest.mark.parametrize("owner", [0, 2])
def test_no_stage_waits_for_an_owner_with_a_failed_optimizer(job: JobFolder, owner: int) -> None:
    """The other stages wait for the parameter's new value, and nothing else delays this step."""
    text = BODY.replace("max_grad_norm = 0.5\n", "")
    if owner:
        text = text.replace('["embed.weight", "head.weight"]', '["head.weight", "embed.weight"]')
    troubled = '\n[[stages]]\noptimizer = "zoo:TroubledSGD"\n'
    text += "\n[[stages]]\n" * owner + troubled + "\n[[stages]]\n" * (2 - owner)
    config = loader.load_config(job.config(text)).without_recovery()
    with local_group(config) as local, pytest.raises(StageError) as raised:
        local.train()
    message = f"stage 'stage{owner}' failed in optimizer at step 2: ValueError: planted"
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ('[["embed.weight", "head.weigth"]]', "no parameter 'head.weigth'; did you mean 'head.w"),
        (
            '[["embed.weight", "hed.weight"]]',
            "no parameter 'hed.weight'; did you mean 'head.weight'? (there are 'embed.",
        ),
        ('[["embed.weight", "mix.weight"]]', "'mix.weight' is torch.float32 of shape (8, 8), but"),
        ('[["embed.weight"]]', "names one parameter; name at least two"),
        ('[["embed.weight", "embed.weight"]]', "embed.weight is named twice"),
    ],
)
def test_parameters_that_cannot_be_tied_are_refused_before_anything_starts(
    job: JobFolder, tied: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_job(loader.load_config(job.config(BODY), [f"tied={tied}"]))
    assert message in str(refused.value)


def test_a_frozen_stage_cannot_share_a_weight_with_a_trained_one(job: JobFolder) -> None:
    text = BODY + "\n[[stages]]\nfrozen = true\n[[stages]]\n[[stages]]\n"
    message = "'head.weight' is torch.float32 of shape .11, 8., trained, but"
    with (
        pytest.raises(ConfigError, match=message),
        local_group(loader.load_config(job.config(text))),
    ):
        pass
