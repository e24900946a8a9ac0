"""Unmodified modules on real workers; tests/group/test_modules.py compares every kind of job."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_model

from tests.support.processes import JobFolder, rpcmp
from tests.zoo import architectures, unsplit

LANGUAGE = """
loss = "rpcmp.losses:masked_lm"
num_microbatches = 3
schedule = "zero-bubble"
steps = 6
[model]
module = "unsplit:Language"
balance = [1, 3, 1]
[data]
train = "unsplit:sentences"
batch_size = 9
"""


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of a run's parameters, equal to those of the module itself."""
    job = JobFolder(tmp_path_factory.mktemp("verified") / "job")
    result = rpcmp("verify", job.config(LANGUAGE), "--steps", "6")
    assert result.code == 0, result.err
    assert "identical: 6 losses" in result.out
    return result.out.split()[-1]


def test_a_module_is_balanced_saved_resumed_under_another_balance_and_exported(
    job: JobFolder, verified: str
) -> None:
    config = job.config(LANGUAGE + '[checkpoint]\ndir = "saved"\n')
    first = rpcmp("drive", config, "--json", "--set", "steps=3")
    assert first.code == 0, first.err
    measured = ("--set", 'model.balance="auto"', "--set", "model.num_stages=2")
    second = rpcmp("drive", config, "--json", "--resume", *measured)
    assert second.code == 0, second.err
    assert second.event("summary")["parameters_sha256"] == verified
    exported = job.folder / "model.safetensors"
    assert rpcmp("export", job.folder / "saved", exported).code == 0
    module = unsplit.Language()
    module.load_state_dict(load_file(exported), strict=True)
    assert torch.equal(module.head.weight, module.embed.weight)


@pytest.mark.cluster
def test_frozen_weights_that_have_changed_in_init_are_noticed(job: JobFolder) -> None:
    weights = job.folder / "base.safetensors"
    config = job.config(f"{architectures.job('adapted', 2, '1f1b')}\n[checkpoint]\ndir = 'saved'")
    options = ("--json", "--set", f'init="{weights}"')
    torch.manual_seed(5)
    module = unsplit.Language()
    save_model(module, str(weights))
    whole = rpcmp("drive", config, *options, "--set", "checkpoint.dir=whole")
    assert rpcmp("drive", config, *options, "--steps", "2").code == 0
    with torch.no_grad():
        module.get_parameter("layers.1.norm.weight")[0] += 1e-6
    save_model(module, str(weights))
    refused = rpcmp("drive", config, *options, "--resume")
    assert refused.code != 0
    assert (
        "`init` has other frozen weights for layer 'base.layers.1' than when step 2" in refused.err
    )
    torch.manual_seed(5)
    save_model(unsplit.Language(), str(weights))
    resumed = rpcmp("drive", config, *options, "--resume", "--set", "model.num_stages=3")
    ends = [run.event("summary")["parameters_sha256"] for run in (whole, resumed)]
    assert ends[0] == ends[1]


@pytest.mark.cluster
def test_explain_shows_where_a_module_can_be_cut(job: JobFolder) -> None:
    result = rpcmp("explain", job.config(LANGUAGE), "--no-measure", "--json")
    cuts = json.loads(result.out)["cuts"]
    assert [(cut["after"], cut["before"], cut["is_used"]) for cut in cuts] == [
        ("embed", "layers.0", True),
        ("layers.0", "layers.1", False),
        ("layers.1", "layers.2", False),
        ("layers.2", "head", True),
    ]
    assert sorted(cuts[0]["values"]) == ["float32[*, *, 8]", "float32[*, *]", "float32[8]"]
    shown = rpcmp("explain", job.config(LANGUAGE), "--no-measure").out
    assert "Where the module can be cut" in shown


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (['model.split=["layer.*"]'], "split: 'layer.*' fits no submodule of the model; did you"),
        (["model.balance=[1,1,1,1,1,1]"], "the model has 5"),
        (['model.inputs=["tokens","musk"]'], "the batch has no 'musk'; did you mean 'mask'?"),
        (['model.module="unsplit:Branching"'], "forward takes no 'tokens', which the batch has"),
        (['model.module="unsplit:Lost"'], "has no attribute 'Lost'; did you mean"),
        (['model.module="unsplit:sentences"'], "returns list, not an nn.Module"),
        (["model.kwargs={ blocs = 3 }"], "unexpected keyword argument 'blocs'"),
        (['tied=[["embed.weight","head.weight"]]'], "`tied` follows from the model's `module`"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_starts(
    job: JobFolder, overrides: list[str], text: str
) -> None:
    options = [part for override in overrides for part in ("--set", override)]
    result = rpcmp("drive", job.config(LANGUAGE), *options)
    assert result.code == 2, result.err
    assert text in result.err
    assert "stages" not in result.out


@pytest.mark.cluster
def test_a_module_is_tuned(job: JobFolder) -> None:
    options = ("--rounds", "1", "--steps", "1", "--microbatches", "3", "--schedules", "1f1b,gpipe")
    result = rpcmp("tune", job.config(LANGUAGE), "--json", *options)
    assert result.code == 0, result.err
    assert json.loads(result.out)["best"]["num_microbatches"] == 3


def test_a_module_with_tied_parameters_is_not_compared_with_others(job: JobFolder) -> None:
    result = rpcmp("bench", job.config(LANGUAGE))
    assert result.code == 2
    assert "`module` has tied parameters, which the other contestants do not know" in result.err
