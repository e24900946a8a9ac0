"""A stage's layers are what a process that builds the whole model gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.worker.building import build
from tests.zoo import counting


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    counting.reset()
    yield
    counting.reset()


def configured(kind: str, source: str = "numbered") -> Config:
    model = {
        "layers": f"tests.zoo.counting:{source}",
        "num_stages": 3,
        "kwargs": {"kind": kind},
    }
    return parse_config({"loss": "torch.nn:MSELoss", "model": model})


@pytest.mark.parametrize("kind", ["partial", "rates"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_constructors_count_is_as_in_one_process(kind: str, stage: int) -> None:
    whole = [make() for _, make in counting.numbered(kind)]
    counting.reset()
    name = ("first", "middle", "head")[stage]
    modules, shared = build(configured(kind), stage, [name], loads=False)
    built = modules[name]
    assert isinstance(built, counting.Numbered)
    assert (built.number, built.share) == (whole[stage].number, whole[stage].share)
    assert next(built.parameters()).device == torch.device("cpu")
    assert [*modules] == [name]
    assert len(shared) == (kind == "rates" and stage < 2)


def test_a_constructor_that_needs_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbered(kind: str) -> object:
        def first() -> counting.Numbered:
            made = counting.Numbered()
            assert next(made.parameters()).sum().item() != 0
            return made

        return [("first", first), ("middle", counting.Numbered), ("head", counting.Numbered)]

    monkeypatch.setattr(counting, "numbered", numbered)
    with pytest.raises(FactoryError, match="layer 'first' of another stage cannot be built with"):
        build(configured("partial"), 1, ["middle"], loads=False)


def test_what_factories_share_with_other_stages_is_named() -> None:
    for stage, names, count in [(0, ["first"], 1), (1, ["first", "middle"], 0), (2, ["head"], 0)]:
        _, shared = build(configured("counting", "sharing"), stage, names, loads=False)
        assert len(shared) == count
        assert [name for name, _ in shared] == ["what 'first' and 'middle' share"] * count


def test_a_parameter_without_a_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(kind: str) -> object:
        return [("first", lambda: nn.LazyLinear(4)), ("middle", nn.Identity), ("head", nn.Identity)]

    monkeypatch.setattr(counting, "numbered", lazy)
    with pytest.raises(ConfigError, match=r"'first\.weight' has no shape before the first forward"):
        build(configured("partial"), 0, ["first"], loads=False)


def test_parts_of_one_memory_are_weights_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.zeros(8)

    class Fixed(nn.Module):
        def __init__(self, start: int) -> None:
            super().__init__()
            self.values = flat[start : start + 4]

    def layers(kind: str) -> object:
        head = nn.Linear(2, 2, bias=False)
        head.weight = nn.Parameter(flat[:4].view(2, 2))
        return [("first", Fixed(2 if kind == "overlaps" else 4)), ("head", head)]

    monkeypatch.setattr(counting, "numbered", layers)
    model = {"layers": "tests.zoo.counting:numbered", "num_stages": 2}
    for kind in ("apart", "overlaps"):
        job = {"loss": "torch.nn:MSELoss", "model": model | {"kwargs": {"kind": kind}}}
        if kind == "apart":
            build(parse_config(job), 0, ["first"], loads=False)
            continue
        with pytest.raises(ConfigError, match=r"reads 'first\.values', which the layer 'head'"):
            build(parse_config(job), 0, ["first"], loads=False)


def test_what_modules_share_is_named_alike_in_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0.0
            self.register_buffer("value", None)

    meter, table = Meter(), torch.ones(3)

    def layers(kind: str) -> object:
        made = [nn.Sequential(meter) for _ in range(3)]
        for each in made[:2]:
            each.register_buffer("table", table)
        made[0].register_buffer("own", torch.ones(3))
        return list(zip(("first", "middle", "head"), made, strict=True))

    monkeypatch.setattr(counting, "numbered", layers)
    shared = [
        {name for name, _ in build(configured("x"), stage, [layer], loads=False)[1]}
        for stage, layer in enumerate(("first", "middle", "head"))
    ]
    assert shared[0] == shared[1]
    assert len(shared[0]) == 3  # the meter's number and buffer, and the table
    assert len(shared[2]) == 2
    assert shared[2] < shared[0]
