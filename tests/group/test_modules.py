"""Unmodified modules: the stages give the bits of the module itself, which nobody has cut."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file, save_model

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.errors import CheckpointError, ConfigError, JobError, StageConfigError
from tests.support.cuts import cut_here
from tests.support.localgroup import local_group, require_same_bits
from tests.support.processes import JobFolder
from tests.zoo import architectures, unsplit


def cut(job: JobFolder, name: str, *overrides: str, schedule: str = "1f1b") -> Config:
    text = architectures.job(name, 3, schedule)
    config = loader.load_config(job.config(text), overrides)
    return cut_here(config)


@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.cluster), "1f1b", "zero-bubble"]
)
@pytest.mark.parametrize(
    "name",
    [
        "language",
        pytest.param("half frozen", marks=pytest.mark.cluster),
        pytest.param("unet", marks=pytest.mark.cluster),
        "two by two",
    ],
)
def test_a_module_is_trained_with_its_own_bits(job: JobFolder, name: str, schedule: str) -> None:
    require_same_bits(cut(job, name, schedule=schedule))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.balance=[1, 3, 1]"],
        ["stages=[{}, { replicas = 2 }, { recompute = true }]"],
        pytest.param(["autocast=bfloat16"], marks=pytest.mark.cluster),
        ["autocast=float16", "loss_scaling={ initial = 128.0 }"],
        ["microbatches_per_message=2", "max_grad_norm=0.1"],
        pytest.param(["data.at=stage"], marks=pytest.mark.cluster),
        pytest.param(["stages=[{}, { frozen = true }, {}]"], marks=pytest.mark.cluster),
        ['optimizer.groups=[{ match = ["*.bias", "head.weight"], lr = 0.1 }]'],
    ],
    ids=str,
)
def test_a_module_goes_with_everything_else(job: JobFolder, overrides: list[str]) -> None:
    require_same_bits(cut(job, "language", *overrides, schedule="zero-bubble"))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_frozen_part_comes_from_init_and_is_stored_nowhere_else(
    job: JobFolder, schedule: str
) -> None:
    torch.manual_seed(5)
    weights = job.folder / "base.safetensors"
    save_model(unsplit.Language(), str(weights))
    run = require_same_bits(cut(job, "adapted", f'init="{weights}"', schedule=schedule))
    assert set(run.state) == {"before", "after.weight", "after.bias", "base.scale"}


def test_a_frozen_part_of_init_that_a_forward_changes_is_refused(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    drifting = architectures.Architecture(unsplit.Drifting, unsplit.sentence)
    monkeypatch.setitem(architectures.ARCHITECTURES, "adapted", drifting)
    weights = job.folder / "base.safetensors"
    save_model(unsplit.Language(), str(weights))
    with pytest.raises(ConfigError, match=r"forward changes base\.layers\.1\.inner\.0\.bias each"):
        cut(job, "adapted", f'init="{weights}"')
    config = cut(job, "adapted", f'init="{weights}"', "num_microbatches=1")
    with (
        local_group(config) as local,
        pytest.raises(JobError, match=r"what rpcmp\.from_init builds"),
    ):
        local.train()


def test_frozen_weights_that_have_changed_in_init_are_noticed(job: JobFolder) -> None:
    weights = job.folder / "base.safetensors"
    torch.manual_seed(5)
    module = unsplit.Language()
    save_model(module, str(weights))
    whole = require_same_bits(cut(job, "adapted", f'init="{weights}"'))
    with local_group(cut(job, "adapted", f'init="{weights}"', "steps=2")) as local:
        local.train()
        saved = local.save(job.folder / "saved")
    with local_group(cut(job, "adapted", f'init="{weights}"'), saved) as local:
        assert local.train().losses == whole.losses[2:]
    with torch.no_grad():
        module.get_parameter("layers.1.norm.weight")[0] += 1e-6
    save_model(module, str(weights))
    text = r"`init` has other frozen weights for layer 'base\.layers\.1' than when step 2"
    with (
        pytest.raises(CheckpointError, match=text),
        local_group(cut(job, "adapted", f'init="{weights}"'), saved),
    ):
        pass


def test_a_module_begins_with_the_weights_of_init(job: JobFolder) -> None:
    """With both names of a tied weight, as an export has them."""
    weights = job.folder / "model.safetensors"
    save_file({name: value.clone() for name, value in trained().items()}, str(weights))
    run = require_same_bits(cut(job, "language", f'init="{weights}"', "optimizer.kwargs.lr=0.0"))
    assert all(torch.equal(run.state[name], value) for name, value in trained().items())


def trained() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return unsplit.Language().state_dict()


def test_what_init_lacks_of_its_part_is_named(job: JobFolder) -> None:
    weights = job.folder / "base.safetensors"
    state = unsplit.Language().state_dict()
    del state["head.weight"], state["embed.weight"], state["scale"]
    save_file(state, str(weights))
    with pytest.raises(StageConfigError, match=r"lacks base\.scale, base\.embed\.weight"):
        require_same_bits(cut(job, "adapted", f'init="{weights}"'))
