"""Which layer has which parameter, under which name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.config.types import COPY
from rpcmp.errors import ConfigError
from rpcmp.splitting.split import split_module
from tests.support.splitmodules import CASES, layers_of, split_of


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_buffers_keep_their_names(name: str) -> None:
    module, split = split_of(name)
    names = [key for layer in layers_of(module, split) for key in layer.state_dict()]
    names = [name for name in names if COPY not in name]
    names += [alias for aliases in split.aliases.values() for alias in aliases]
    assert sorted(names) == sorted(module.state_dict())


def test_tied_parameters_are_found_and_each_layer_has_its_own() -> None:
    module, split = split_of("language")
    assert split.tied == [["embed.weight", "head.weight"]]
    first, *_, last = layers_of(module, split)
    tied = (
        dict(first.named_parameters())["embed.weight"],
        dict(last.named_parameters())["head.weight"],
    )
    assert tied[0] is not tied[1]
    assert tied[0].equal(tied[1])


def test_a_parameter_that_stands_in_several_layers_by_one_name_is_copied() -> None:
    module, split = split_of("half frozen")
    assert split.tied == [["embed.weight", "embed.weight@5"]]
    assert [layer.name for layer in split.layers if "embed.weight@5" in layer.tensors] == ["embed+"]
    assert "embed.weight@5" in layers_of(module, split)[-1].state_dict()


def test_a_block_that_runs_twice_is_in_one_layer() -> None:
    _, split = split_of("repeating")
    assert [layer.tensors for layer in split.layers] == [
        ["begin.bias", "begin.weight"],
        ["blocks.0.bias", "blocks.0.weight", "blocks.1.bias", "blocks.1.weight"],
        ["end.bias", "end.weight"],
    ]


def test_what_no_state_dict_has_is_copied_to_where_it_is_read() -> None:
    _, split = split_of("language")
    assert [layer.passing for layer in split.layers] == [["table"], [], [], [], []]


def test_what_no_operation_uses_is_kept() -> None:
    _, split = split_of("language")
    (owner,) = (layer.name for layer in split.layers if "unused.weight" in layer.tensors)
    assert owner == "embed"


class Hiding(nn.Module):
    """Keeps a part of its parameters out of its state dict."""

    def __init__(self, hidden: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self._hidden = hidden

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().state_dict(*args, **kwargs)
        return {name: each for name, each in whole.items() if name != self._hidden}

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def test_parameters_that_no_state_dict_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Hiding.state_dict leaves out .* body\.1\.bias, which"):
        split_module(Hiding("body.1.bias"), torch.ones(3, 4))


def test_what_is_no_tensor_is_told_to_be_in_no_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    split = split_module(Hiding(""), torch.ones(3, 4))
    assert "_extra_state: in no checkpoint and no export" in caplog.text
    assert [layer.name for layer in split.layers] == ["body.0", "body.1"]
