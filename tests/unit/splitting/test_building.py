"""Modules that are built without their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import nn

import rpcmp
from rpcmp.errors import ConfigError
from rpcmp.splitting import building
from rpcmp.splitting.building import build_without_weights, require_own_memory
from rpcmp.splitting.split import split_module
from tests.support.splitmodules import tokens
from tests.zoo import unsplit

MIB = 2**20


def test_parameters_cost_no_memory_until_they_are_written() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))

    before = psutil.Process().memory_info().rss
    module = build_without_weights(make)
    assert sum(p.nbytes for p in module.parameters()) > 256 * MIB
    assert psutil.Process().memory_info().rss - before < 64 * MIB
    with torch.no_grad():
        for parameter in module[0].parameters():  # type: ignore[index]
            parameter.fill_(1.0)
    assert module[0].weight.sum() == 2048**2  # type: ignore[index]


def test_the_module_is_otherwise_as_its_constructor_makes_it() -> None:
    module, expected = build_without_weights(unsplit.Language), unsplit.Language()
    assert module.get_parameter("head.weight") is module.get_parameter("embed.weight")
    assert list(module.state_dict()) == list(expected.state_dict())
    for name, buffer in expected.named_buffers():
        assert torch.equal(module.get_buffer(name), buffer)
    for name, parameter in expected.named_parameters():
        found = module.get_parameter(name)
        assert (found.shape, found.dtype) == (parameter.shape, parameter.dtype)
        assert (found.device.type, found.requires_grad) == ("cpu", parameter.requires_grad)


def test_it_is_cut_like_the_module_with_its_weights() -> None:
    batch = tokens(4, 8)
    whole = split_module(unsplit.Language(), batch)
    assert split_module(build_without_weights(unsplit.Language), batch) == whole


def test_modules_are_built_as_usual_afterwards_also_after_an_error() -> None:
    def fail() -> nn.Module:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build_without_weights(fail)
    assert nn.Linear(1, 1).weight.device.type == "cpu"
    frozen = build_without_weights(lambda: nn.Linear(1, 1).requires_grad_(False))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_what_is_around_the_part_that_init_has_gets_its_values() -> None:
    module = building.build_without_weights(unsplit.Adapted)
    assert module.before.abs().max() > 0
    assert module.after.weight.abs().max() > 0
    assert module.base.head.weight is module.base.embed.weight
    assert not module.base.embed.weight.requires_grad


def test_a_copy_of_a_part_that_init_has_is_in_init_as_well() -> None:
    part = building.from_init(lambda: nn.Linear(2, 2))
    for copied in (copy.deepcopy(part), copy.deepcopy(copy.deepcopy(part))):
        assert copied.weight is not part.weight
        assert building.names_in_init(copied.weight) == ["weight"]


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("first", self.inner.weight.detach().clone())


def test_a_buffer_that_is_computed_from_parameters_needs_them() -> None:
    with pytest.raises(ValueError, match="the buffer 'first' is computed from parameters"):
        build_without_weights(Remembering)


def test_parameters_keep_their_names_in_init() -> None:
    for module in (unsplit.Adapted(), building.build_without_weights(unsplit.Adapted)):
        known = dict(module.base.named_parameters())
        assert building.names_in_init(known["layers.1.norm.bias"]) == ["layers.1.norm.bias"]
        assert building.names_in_init(module.base.embed.weight) == ["embed.weight", "head.weight"]
        assert building.names_in_init(module.base.scale) == ["scale"]
        assert building.names_in_init(module.base.table) == []  # no state dict has it
        assert building.names_in_init(module.after.weight) == []
    assert (
        building.from_init(unsplit.Adapted).after.weight.abs().max() > 0
    )  # where nothing is left out


def test_the_place_of_init_is_known_while_modules_are_built() -> None:
    with building.init_at("/models/a"):
        with building.init_at("/models/b"):
            assert rpcmp.init_path() == "/models/b"
        assert rpcmp.init_path() == "/models/a"
        with building.init_at(None), pytest.raises(ConfigError, match="of a job with `init`"):
            rpcmp.init_path()
    with pytest.raises(ConfigError, match="of a job with `init`"):
        rpcmp.init_path()


class Pair(nn.Module):
    """Two linear layers, the second of which is made by a function of the first."""

    def __init__(self, second: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = second(self.first)


def of_transposed(first: nn.Linear) -> nn.Module:
    second = nn.Linear(2, 2)
    second.weight.data = first.weight.data.t()
    return second


def of_table(first: nn.Linear) -> nn.Module:
    second = nn.Identity()
    second.register_buffer("table", first.weight.data[:1])
    return second


@pytest.mark.parametrize("second", [of_transposed, of_table])
def test_parameters_that_share_memory_are_refused(second: Callable[[nn.Linear], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"'first\.weight' and 'second\.\w+' share memory"):
        require_own_memory(Pair(second))


def test_a_parameter_of_two_names_and_parts_of_a_buffer_may_share() -> None:
    tied, parts = Pair(lambda first: first), nn.Module()
    require_own_memory(tied)
    flat = torch.zeros(8)
    parts.register_buffer("all", flat)
    parts.register_buffer("some", flat[:2])
    parts.one, parts.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    parts.one.data, parts.other.data = (each.clone() for each in (flat[:2], flat[2:4]))
    require_own_memory(parts)
    joint = torch.zeros(4)
    parts.one.data, parts.other.data = joint[:2], joint[2:]  # side by side
    require_own_memory(parts)


def test_sharing_is_seen_before_each_parameter_gets_memory() -> None:
    with pytest.raises(ConfigError, match="share memory"):
        build_without_weights(lambda: Pair(of_transposed))
