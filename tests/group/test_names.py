"""Stages with the parameter names of the plain model, which they load and export."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file

from rpcmp.config import loader
from rpcmp.config.schema import Config
from tests.support.localgroup import require_same_bits
from tests.support.localpipeline import local_pipeline
from tests.support.nearness import assert_near
from tests.support.places import ZOO
from tests.support.plainjob import STAGES
from tests.support.processes import JobFolder
from tests.zoo.plain import Plain


def test_stages_started_from_the_plain_model_have_the_bits_of_one_process(job: JobFolder) -> None:
    torch.manual_seed(5)
    plain = Plain()
    save_file({n: v.clone() for n, v in plain.state_dict().items()}, job.folder / "begin")
    found = require_same_bits(loader.load_config(job.config('init = "begin"\n' + STAGES)))
    assert (len(found.losses), len(found.state)) == (3, 7)
    assert found.state.keys() == plain.state_dict().keys()
    plain.load_state_dict(found.state, strict=True)


def test_a_program_exchanges_state_dicts_with_the_plain_model() -> None:
    sys.modules.setdefault("plain", sys.modules[Plain.__module__])
    given = {"loss": "zoo:token_loss", "tied": [["embed.weight", "head.weight"]]}
    stages = [
        {"name": "words", "module": "plain:Words", "prefix": ""},
        {"name": "middle", "module": "plain:encoder", "prefix": "encoder."},
        {"module": "plain:Head", "inputs": ["words", "middle"], "prefix": ""},
    ]
    plain = Plain().eval()
    config = Config.model_validate({**given, "stages": stages}).with_folder(ZOO)
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(1))
    with local_pipeline(config) as pipeline:
        pipeline.load_state_dict(plain.state_dict())
        assert_near(pipeline.predict(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
        plain.load_state_dict(pipeline.state_dict(), strict=True)
