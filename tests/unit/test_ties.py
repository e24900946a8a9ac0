"""Parameters that several stages share: one gradient, one optimizer's state, one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import rpcmp as library
from rpcmp import names
from rpcmp.config import Config
from rpcmp.configfile import parse
from rpcmp.errors import ConfigError, StageError
from tests.support.faults import committed, drive
from tests.support.places import ZOO
from tests.support.processes import JobFolder, rpcmp

BODY = """
    steps = 6
    schedule = "zero-bubble"
    loss = "zoo:token_loss"
    num_microbatches = 3
    max_grad_norm = 0.5
    tied = [["embed.weight", "head.weight"]]
    optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
    [model]
    layers = "zoo:language"
    balance = [1, 2, 1]
    [data]
    train = "zoo:tokens"
    batch_size = 12
"""

REPLICAS = "\n[[stages]]\nreplicas = 2\n[[stages]]\n[[stages]]\nreplicas = 2\n"


def sha256(out: str) -> str:
    return out.split()[-1]


def test_stages_that_share_a_weight_give_the_bits_of_one_process_wherever_the_cuts_are(
    job: JobFolder,
) -> None:
    cut = rpcmp("verify", job.config(BODY), "--steps", "6")
    whole = rpcmp("verify", job.config(BODY), "--steps", "6", "--set", "model.balance=[4]")
    assert "identical: 6 losses and 6 tensors" in cut.out, cut.err  # one of them stands twice
    assert sha256(cut.out) == sha256(whole.out)
    free = rpcmp("drive", job.config(BODY), "--set", "tied=[]")
    assert sha256(free.out) != sha256(cut.out)


def test_a_group_holds_for_a_shared_weight_by_its_second_name(job: JobFolder) -> None:
    group = ("--set", 'optimizer.groups=[{match=["head.weight"],lr=0.5}]')
    cut = rpcmp("verify", job.config(BODY), "--steps", "3", *group)
    whole = rpcmp("verify", job.config(BODY), "--steps", "3", *group, "--set", "model.balance=[4]")
    plain = rpcmp("verify", job.config(BODY), "--steps", "3")
    assert "identical: 3 losses and 6 tensors" in cut.out, cut.err
    assert sha256(cut.out) == sha256(whole.out) != sha256(plain.out)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_so_they_do_under_other_schedules_and_with_replicas(job: JobFolder, schedule: str) -> None:
    config = job.config(BODY + REPLICAS)
    result = rpcmp("verify", config, "--steps", "6", "--set", f"schedule={schedule}")
    assert "identical: 6 losses" in result.out, result.err


def test_a_run_with_replicas_that_loses_a_stage_ends_with_the_same_bits_and_is_exported(
    job: JobFolder,
) -> None:
    saved = '\n[checkpoint]\ndir = "saved"\nevery_steps = 2\n'
    config = job.config(BODY + REPLICAS)
    verified = rpcmp("verify", config, "--steps", "6")
    assert "identical: 6 losses" in verified.out, verified.err
    marker = job.folder / "died"
    mortal = f'[model]\n    kwargs = {{ marker = "{marker}" }}'
    job.config(BODY.replace("[model]", mortal) + REPLICAS + saved)
    disturbed = drive(config)
    assert committed(disturbed)[1] == sha256(verified.out)
    assert disturbed.event("recovered")
    assert marker.exists()
    resumed = rpcmp("drive", config, "--json", "--resume", "--set", "steps=8")
    assert resumed.event("resumed")["step"] == 6
    exported = job.folder / "model.safetensors"
    assert rpcmp("export", job.folder / "saved", exported).code == 0
    state = load_file(exported)
    assert torch.equal(state["embed.weight"], state["head.weight"])  # as the unsplit model's has
    begun = rpcmp("drive", config, "--json", "--set", f'init="{exported}"', *fresh("a"))
    assert begun.code == 0, begun.err
    assert rpcmp("export", "--tied-once", job.folder / "saved", exported).code == 0
    assert "head.weight" not in load_file(exported)
    with safe_open(exported, "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
    again = rpcmp("drive", config, "--json", "--set", f'init="{exported}"', *fresh("b"))
    assert begun.losses == again.losses != []


def fresh(folder: str) -> tuple[str, ...]:
    """One step, with checkpoints of its own."""
    return ("--set", "steps=1", "--set", f"checkpoint.dir={folder}")


def program(**more: Any) -> Config:
    """A job of two stages that share a weight, whose batches a program brings."""
    data = {
        "model": {"layers": "zoo:language", "balance": [2, 2]},
        "loss": "zoo:token_loss",
        "tied": [["embed.weight", "head.weight"]],
        "num_microbatches": 2,
    }
    return Config.model_validate({**data, **more}).with_folder(ZOO)


def test_a_program_sees_one_parameter() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(11, (4, 6))
    with library.launch(program()) as pipeline:
        state = pipeline.state_dict()
        assert state["head.weight"] is state["embed.weight"]
        state["embed.weight"].fill_(0.0)
        pipeline.load_state_dict(state)
        assert torch.equal(pipeline.predict(tokens), torch.zeros(4, 6, 11))  # of the head as well
        pipeline.forward_backward(tokens, tokens)
        pipeline.optimizer.zero_grad()
        assert pipeline.optimizer.clip_grad_norm_(1.0) == 0.0


# What is wrong


def test_a_program_gets_its_model_back_after_an_owners_optimizer_has_failed() -> None:
    """Its stage's neighbours waited in the same call for what the parameter would become."""
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    stages = [{"optimizer": "zoo:TroubledSGD"}, {}]
    with library.launch(program(stages=stages, recovery={"enabled": False})) as pipeline:
        pipeline.forward_backward(tokens, tokens)
        pipeline.optimizer.step()
        pipeline.forward_backward(tokens, tokens)
        with pytest.raises(StageError, match="'stage0' failed in optimizer at step 2: ValueError"):
            pipeline.optimizer.step()
        assert "embed.weight" in pipeline.state_dict()


@pytest.mark.parametrize("owner", [0, pytest.param(2, marks=pytest.mark.long)])
def test_nobody_waits_for_an_owner_whose_optimizer_fails(job: JobFolder, owner: int) -> None:
    """The others wait for what the parameter has become, in a step that nothing else holds."""
    text = BODY.replace("max_grad_norm = 0.5\n", "")
    if owner:
        text = text.replace('["embed.weight", "head.weight"]', '["head.weight", "embed.weight"]')
    troubled = '\n[[stages]]\noptimizer = "zoo:TroubledSGD"\n'
    text += "\n[[stages]]\n" * owner + troubled + "\n[[stages]]\n" * (2 - owner)
    once = ("--set", "recovery.watchdog=30.0", "--set", "recovery.enabled=false")
    result = rpcmp("drive", job.config(text), *once)
    assert result.code != 0
    said = f"stage 'stage{owner}' failed in optimizer at step 2: ValueError: planted"
    assert said in result.err
    assert "hangs" not in result.err


@pytest.mark.parametrize(
    ("tied", "said"),
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
def test_what_cannot_be_one_is_refused_before_anything_starts(
    job: JobFolder, tied: str, said: str
) -> None:
    result = rpcmp("drive", job.config(BODY), "--set", f"tied={tied}")
    assert result.code == 2
    assert said in result.err


def test_a_frozen_stage_cannot_share_with_one_that_is_trained(job: JobFolder) -> None:
    config = job.config(BODY + "\n[[stages]]\nfrozen = true\n[[stages]]\n[[stages]]\n")
    result = rpcmp("drive", config)
    assert result.code == 2
    assert "'head.weight' is torch.float32 of shape (11, 8), trained, but" in result.err


def test_the_longest_name_of_a_layer_counts() -> None:
    config = parse({"loss": "torch.nn:MSELoss", "model": {"layers": "tests.zoo.models:layers"}})
    unknown = dict.fromkeys(["a", "a.b", "c"])
    assert names.layer_of(config, "a.b.weight", unknown) == "a.b"
    with pytest.raises(ConfigError, match=r"'d\.weight' lies in no layer \(.* 'a', 'a.b', 'c'\)"):
        names.layer_of(config, "d.weight", unknown)
