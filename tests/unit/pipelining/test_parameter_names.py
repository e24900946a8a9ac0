"""Stages with the parameter names of the user's existing model, and those that several share."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rpcmp.config.loader import parse_config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import assignment, initial_weights, parameter_names
from rpcmp.pipelining.weight_files import WeightFiles
from tests.support.graphs import chain_of
from tests.zoo import models


def assigned(*prefixes: str | None, tied: list[list[str]] | None = None, **more: object) -> None:
    modules = ("tests.zoo.plain:Words", "tests.zoo.plain:encoder", "tests.zoo.plain:encoder")
    stages = [
        {"name": name, "module": module, **({} if prefix is None else {"prefix": prefix})}
        for name, module, prefix in zip("abc", modules, prefixes, strict=True)
    ]
    assignment.assign(
        parse_config({"loss": "torch.nn:MSELoss", "stages": stages, "tied": tied or [], **more})
    )


@pytest.mark.parametrize(
    ("prefixes", "tied", "message"),
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
    prefixes: tuple[str, ...], tied: list[str] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assigned(*prefixes, tied=[tied] if tied else None)


def test_stages_may_be_cut_out_of_a_sequential() -> None:
    stages = [
        {"module": "torch.nn:Linear", "kwargs": {"in_features": a, "out_features": b}, "prefix": p}
        for a, b, p in ((4, 6, "0"), (6, 6, "2."), (6, 1, "4"))
    ]
    config = parse_config({"loss": "torch.nn:MSELoss", "stages": stages})
    found = parameter_names.named_parameters_of(config, [[name] for name in config.stage_names])
    assert found is not None
    state = [name for named in found.values() for name in named.state]
    assert state == [*models.as_sequential().state_dict()]
    assigned("", "encoder.0", "encoder.1")


def test_the_reason_for_unknown_names_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    stages = [{"name": "a", "module": "tests.zoo.models:raising"}]
    caplog.set_level(logging.DEBUG, "rpcmp.pipelining.parameter_names")
    assert (
        parameter_names.named_parameters_of(
            parse_config({"loss": "torch.nn:MSELoss", "stages": stages}), [["a"]]
        )
        is None
    )
    assert "stage 'a' cannot be built on the meta device here" in caplog.text
    assert "ValueError: out of order" in caplog.text


def test_modules_that_cannot_be_built_are_distinguished_by_their_prefix() -> None:
    stages = [
        {"name": name, "module": "elsewhere:Module", "prefix": prefix}
        for name, prefix in (("a", ""), ("b", "b"), ("c", ""))
    ]
    given = {"loss": "torch.nn:MSELoss", "stages": stages}
    ((place, _),) = assignment.assign(parse_config({**given, "tied": [["b.weight", "b.other"]]}))[
        0
    ].tied
    assert place.stage == "b"
    with pytest.raises(ConfigError, match="may lie in 'a' or 'c', whose modules cannot be built"):
        assignment.assign(parse_config({**given, "tied": [["weight", "b.other"]]}))


def test_the_only_host_with_the_weights_reports_unknown_names(tmp_path: Path) -> None:
    path = str(tmp_path / "weights")
    layer = nn.Linear(1, 1)
    named = {f"a.{name}": value for name, value in layer.state_dict().items()}
    save_file({**named, "a.wieght": torch.ones(1)}, path)

    def load(tied_to: dict[str, str], owns_prefixes: bool) -> None:
        files = WeightFiles(path)
        stored = initial_weights.StoredNames(files.names, tied_to)
        initial_weights.load_weights(files, {"a": ("a.", layer)}, stored, owns_prefixes)

    with pytest.raises(ConfigError, match=r"it has, for no layer, a\.wieght"):
        load({}, owns_prefixes=True)
    load({}, owns_prefixes=False)
    load({"a.wieght": "a.weight"}, owns_prefixes=True)


def test_the_longest_name_of_a_layer_counts() -> None:
    config = chain_of(2, model={"layers": "tests.zoo.models:layers", "num_stages": 2})
    unknown = dict.fromkeys(["a", "a.b", "c"])
    assert parameter_names.layer_of(config, "a.b.weight", unknown) == "a.b"
    with pytest.raises(ConfigError, match=r"'d\.weight' lies in no layer \(.* 'a', 'a.b', 'c'\)"):
        parameter_names.layer_of(config, "d.weight", unknown)
