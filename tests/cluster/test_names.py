"""A run that starts from the plain model and exports it. See tests/group/test_names.py."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

import rpcmp as library
from rpcmp.config import loader
from tests.support.localgroup import unsplit
from tests.support.plainjob import STAGES
from tests.support.processes import JobFolder, rpcmp
from tests.zoo.plain import Plain


def test_weights_travel_from_the_plain_model_and_back(
    job: JobFolder,
) -> None:
    torch.manual_seed(5)
    plain = Plain()
    save_file({n: v.clone() for n, v in plain.state_dict().items()}, job.folder / "begin")
    config = job.config('init = "begin"\n' + STAGES)
    reference = unsplit(loader.load_config(config))
    done = rpcmp("drive", config, "--json")
    assert done.code == 0, done.err
    assert rpcmp("export", job.folder / "saved", job.folder / "end").code == 0
    state = load_file(job.folder / "end")
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state, strict=True)
    sha256 = library.parameters_sha256(plain.state_dict())
    assert done.event("summary")["parameters_sha256"] == sha256
    assert sha256 == library.parameters_sha256(reference.state)
