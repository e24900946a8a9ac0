"""Stages whose parameters are called as in the model that their user has already."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import rpcmp as library
from rpcmp import names, plan, weights
from rpcmp.config import Config
from rpcmp.configfile import parse
from rpcmp.errors import ConfigError
from tests.support.places import ZOO
from tests.support.processes import JobFolder, rpcmp
from tests.zoo import models
from tests.zoo.plain import Plain

STAGES = """
    steps = 3
    loss = "zoo:token_loss"
    tied = [["embed.weight", "head.weight"]]
    [optimizer]
    callable = "torch.optim:AdamW"
    kwargs = { lr = 0.01 }
    groups = [{ match = ["embed.*", "encoder.1.*", "*.bias"], weight_decay = 0.0 }]
    [data]
    train = "zoo:tokens"
    batch_size = 12
    [checkpoint]
    dir = "saved"
    every_steps = 3
    [[stages]]
    name = "words"
    module = "plain:Words"
    prefix = ""
    [[stages]]
    name = "middle"
    module = "plain:encoder"
    prefix = "encoder"
    [[stages]]
    name = "output"
    module = "plain:Head"
    inputs = ["words", "middle"]
    prefix = ""
"""


def test_the_plain_model_gives_the_weights_to_start_from_and_takes_those_of_the_end(
    job: JobFolder,
) -> None:
    torch.manual_seed(5)
    plain = Plain()
    save_file({n: v.clone() for n, v in plain.state_dict().items()}, job.folder / "begin")
    config = job.config('init = "begin"\n' + STAGES)
    verified = rpcmp("verify", config, "--steps", "3")
    assert "identical: 3 losses and 7 tensors" in verified.out, verified.err
    done = rpcmp("drive", config, "--json")
    assert done.code == 0, done.err
    assert rpcmp("export", job.folder / "saved", job.folder / "end").code == 0
    state = load_file(job.folder / "end")
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state, strict=True)
    sha256 = library.parameters_sha256(plain.state_dict())
    assert done.event("summary")["parameters_sha256"] == verified.out.split()[-1] == sha256


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
    with library.launch(config) as pipeline:
        pipeline.load_state_dict(plain.state_dict())
        assert torch.allclose(pipeline.predict(tokens), plain(tokens), atol=1e-6)
        plain.load_state_dict(pipeline.state_dict(), strict=True)


def assigned(*prefixes: str | None, tied: list[list[str]] | None = None, **more: object) -> None:
    modules = ("tests.zoo.plain:Words", "tests.zoo.plain:encoder", "tests.zoo.plain:encoder")
    stages = [
        {"name": name, "module": module, **({} if prefix is None else {"prefix": prefix})}
        for name, module, prefix in zip("abc", modules, prefixes, strict=True)
    ]
    plan.assign(parse({"loss": "torch.nn:MSELoss", "stages": stages, "tied": tied or [], **more}))


@pytest.mark.parametrize(
    ("prefixes", "tied", "said"),
    [
        (("", "", ""), None, "'b' and 'c' both have '0.weight' in the unsplit model"),
        (("", "x", "y"), ["embed.weight", "x.2.weight"], r"'x.2.weight'; did you .*\(there are 'e"),
        (("", "x", "y"), ["a.embed.weight", "x.0.weight"], "no parameter 'a.embed.weight'; did"),
        (("", "x", "y"), ["embed.weight", "x.0.weight"], r"but 'embed.weight' is torch.float32 of"),
        (("", "a..b", "y"), None, "stages.1.prefix: write a module's name in the unsplit model"),
        (("", ".", "y"), None, "one dot between its parts.* \\(got '.'\\)"),
    ],
)
def test_names_that_do_not_fit_are_refused_before_anything_starts(
    prefixes: tuple[str, ...], tied: list[str] | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        assigned(*prefixes, tied=[tied] if tied else None)


def test_stages_may_be_cut_out_of_a_sequential() -> None:
    stages = [
        {"module": "torch.nn:Linear", "kwargs": {"in_features": a, "out_features": b}, "prefix": p}
        for a, b, p in ((4, 6, "0"), (6, 6, "2."), (6, 1, "4"))
    ]
    config = parse({"loss": "torch.nn:MSELoss", "stages": stages})
    found = names.of_layers(config, [[name] for name in config.stage_names])
    assert found is not None
    state = [name for named in found.values() for name in named.state]
    assert state == [*models.as_sequential().state_dict()]
    assigned("", "encoder.0", "encoder.1")


def test_why_names_are_not_known_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    stages = [{"name": "a", "module": "tests.zoo.models:raising"}]
    caplog.set_level(logging.DEBUG, "rpcmp.names")
    assert names.of_layers(parse({"loss": "torch.nn:MSELoss", "stages": stages}), [["a"]]) is None
    assert "stage 'a' cannot be built on the meta device here" in caplog.text
    assert "ValueError: out of order" in caplog.text


def test_what_cannot_be_built_here_is_told_apart_by_its_prefix() -> None:
    stages = [
        {"name": name, "module": "elsewhere:Module", "prefix": prefix}
        for name, prefix in (("a", ""), ("b", "b"), ("c", ""))
    ]
    given = {"loss": "torch.nn:MSELoss", "stages": stages}
    ((place, _),) = plan.assign(parse({**given, "tied": [["b.weight", "b.other"]]}))[0].tied
    assert place.stage == "b"
    with pytest.raises(ConfigError, match="may lie in 'a' or 'c', whose modules cannot be built"):
        plan.assign(parse({**given, "tied": [["weight", "b.other"]]}))


def test_a_host_that_alone_has_the_weights_finds_names_that_nobody_has(tmp_path: Path) -> None:
    path = str(tmp_path / "weights")
    layer = nn.Linear(1, 1)
    named = {f"a.{name}": value for name, value in layer.state_dict().items()}
    save_file({**named, "a.wieght": torch.ones(1)}, path)
    with pytest.raises(ConfigError, match=r"layer 'a': has no a.wieght"):
        weights.load(path, {"a": ("a.", layer)}, {}, owns_prefixes=True)
    weights.load(path, {"a": ("a.", layer)}, {}, owns_prefixes=False)
    weights.load(path, {"a": ("a.", layer)}, {"a.wieght": "a.weight"}, owns_prefixes=True)
