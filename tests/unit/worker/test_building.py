"""A stage's layers are what a process that builds the whole model gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.errors import FactoryError
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
