"""Parameters that real workers share: lost, saved and exported. See tests/group/test_ties.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rpcmp.config import loader
from tests.support.faults import Committed, committed, drive
from tests.support.localgroup import local_group
from tests.support.processes import JobFolder, rpcmp
from tests.support.tiedjobs import BODY, REPLICAS


@pytest.mark.cluster
def test_tied_replicas_lose_a_stage_keep_their_bits_and_are_exported(
    job: JobFolder,
) -> None:
    saved = '\n[checkpoint]\ndir = "saved"\nevery_steps = 2\n'
    config = job.config(BODY + REPLICAS)
    expected = in_this_process(config)
    marker = job.folder / "died"
    mortal = f'[model]\n    kwargs = {{ marker = "{marker}" }}'
    job.config(BODY.replace("[model]", mortal) + REPLICAS + saved)
    disturbed = drive(config)
    assert committed(disturbed) == expected
    assert disturbed.event("recovered")
    assert marker.exists()
    resumed = rpcmp("drive", config, "--json", "--resume", "--set", "steps=8")
    assert resumed.event("resumed")["step"] == 6
    exported = job.folder / "model.safetensors"
    assert rpcmp("export", job.folder / "saved", exported).code == 0
    state = load_file(exported)
    assert torch.equal(state["embed.weight"], state["head.weight"])  # as in the unsplit model
    begin = ("steps=1", f'init="{exported}"')
    begun = in_this_process(config, *begin)
    assert rpcmp("export", "--tied-once", job.folder / "saved", exported).code == 0
    assert "head.weight" not in load_file(exported)
    with safe_open(exported, "pt") as file:
        assert file.metadata()["head.weight"] == "embed.weight"
    assert in_this_process(config, *begin) == begun != expected


def in_this_process(config: Path, *overrides: str) -> Committed:
    """Return the job's commits in one process, which have the bits of the unsplit model."""
    with local_group(loader.load_config(config, overrides).without_recovery()) as local:
        local.train()
        return local.committed()


def test_parameters_that_cannot_be_tied_are_refused_before_anything_starts(job: JobFolder) -> None:
    tied = 'tied=[["embed.weight", "head.weigth"]]'
    result = rpcmp("drive", job.config(BODY), "--set", tied)
    assert result.code == 2
    assert "no parameter 'head.weigth'; did you mean 'head.w" in result.err
