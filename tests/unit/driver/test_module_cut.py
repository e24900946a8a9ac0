"""A module is cut before a run, once for the same code, arguments and data."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rpcmp.config.job_sections import Passing
from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory
from rpcmp.data.batches import Loaded
from rpcmp.driver import module_cut
from rpcmp.driver.module_cut import cut_module, few_samples, inputs_of
from rpcmp.errors import ConfigError
from rpcmp.splitting.split import Split
from tests.zoo import unsplit


def job(name: str = "two by two", **model: Any) -> Config:
    kwargs = {"name": name}
    return parse_config(
        {
            "loss": "tests.zoo.architectures:error",
            "model": {"module": "tests.zoo.architectures:module", "kwargs": kwargs, **model},
            "data": {"train": {"callable": "tests.zoo.architectures:data", "kwargs": kwargs}},
        }
    )


def test_what_was_kept_of_the_same_module_is_not_cut_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, cut = cut_module(job())
    assert cut.layers == ["left", "blocks.0", "blocks.1", "blocks.2", "first"]
    assert cut.passing[0] == Passing(values=["float32[*, 8]"], sample_bytes=32)
    assert [layer.name for layer in Split.unpack(cut.split).layers] == cut.layers
    kept: dict[str, Any] = {
        "key": {"code": key, "environment": {"HOME": os.environ["HOME"], "NO_SUCH": None}},
        "cut": cut.model_dump(),
    }

    def refuse(*arguments: object) -> None:
        raise AssertionError("cut again")

    monkeypatch.setattr(module_cut, "split_module", refuse)
    assert cut_module(job(), kept) == (key, cut)
    for other in (
        {**kept, "key": {**kept["key"], "code": "another"}},
        {**kept, "key": {**kept["key"], "environment": {"NO_SUCH": "set"}}},
        {**kept, "cut": {**kept["cut"], "split": "damaged"}},
    ):
        with pytest.raises(AssertionError, match="cut again"):
            cut_module(job(), other)
    with pytest.raises(AssertionError, match="cut again"):
        cut_module(job(split=["blocks.1"]), kept)


def test_another_setting_of_a_part_is_another_module() -> None:
    """Wherever it comes from, such as a file that the constructor has read."""
    module, sample = unsplit.Language(), torch.ones(3, 4)
    config = job()

    def key() -> str:
        return module_cut._key(config, model(), module, sample)

    first = key()
    assert key() == first
    module.layers[0].inner[2].p = 0.5  # type: ignore[index,union-attr]
    second = key()
    module.head.weight.requires_grad_(False)
    assert len({first, second, key()}) == 3


def test_a_key_has_what_objects_hold_and_not_what_differs_from_process_to_process() -> None:
    module, sample = unsplit.Language(), torch.ones(3, 4)

    class Settings:
        def __init__(self, **values: object) -> None:
            vars(self).update(values)

    def key(settings: object) -> str:
        module.settings = settings  # type: ignore[assignment]
        return module_cut._key(job(), model(), module, sample)

    first = key(Settings(act="relu", _hash=1, sizes=[1, {"a": 2}], names={"x", "y"}))
    assert first == key(Settings(act="relu", _hash=2, sizes=[1, {"a": 2}], names={"y", "x"}))
    others = [
        Settings(act="tanh", sizes=[1, {"a": 2}], names={"x", "y"}),
        Settings(act="relu", sizes=[1, {"a": 3}], names={"x", "y"}),
        {"act": "relu"},
    ]
    assert len({first, *map(key, others)}) == 4


def test_variables_of_the_environment_are_noted_that_the_users_code_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reading_module.py").write_text(
        "import os\nA = os.environ.get('RPCMP_A')\nB = os.getenv('RPCMP_B', 'none')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RPCMP_A", "a")
    with module_cut.read_environment() as read:
        importlib.import_module("reading_module")
        torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))  # reads many
    assert read == {"RPCMP_A": "a", "RPCMP_B": None}
    monkeypatch.setenv("RPCMP_A", "later")
    assert read == {"RPCMP_A": "a", "RPCMP_B": None}


def test_a_module_needs_data_to_be_cut() -> None:
    config = job().model_copy(update={"data": None})
    with pytest.raises(ConfigError, match=r"no \[data\] section, which cutting the model's `modu"):
        cut_module(config)


TOKENS = torch.ones(4, 6, dtype=torch.int64)


class Open(nn.Module):
    def forward(self, tokens: torch.Tensor, **others: Any) -> torch.Tensor:
        return tokens


def model(**keys: Any) -> Any:
    section = job(**keys).model
    assert section is not None
    return section


def test_a_module_is_called_with_the_parts_that_it_takes() -> None:
    both = {"tokens": TOKENS, "labels": TOKENS, "weights": TOKENS}
    module = unsplit.Language()
    assert inputs_of(module, model(), Loaded(both, both)).keys() == {"tokens"}
    assert inputs_of(Open(), model(), Loaded(both, both)).keys() == {"tokens", "weights"}
    assert inputs_of(Open(), model(), Loaded(both, TOKENS)).keys() == both.keys()
    chosen = inputs_of(Open(), model(inputs=["labels"]), Loaded(both, both))
    assert chosen.keys() == {"labels"}
    assert inputs_of(module, model(), Loaded(TOKENS, TOKENS)) is TOKENS


@pytest.mark.parametrize(
    ("inputs", "keys", "text"),
    [
        ({"tokens": TOKENS, "musk": TOKENS}, {}, "forward takes no 'musk', .*did you mean 'mask'"),
        ({"tokens": TOKENS}, {"inputs": ["token"]}, "has no 'token'; did you mean 'tokens'"),
        (TOKENS, {"inputs": ["tokens"]}, r"parts of a dict, but the batch is int64\[4, 6\]"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(inputs: Any, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        inputs_of(unsplit.Language(), model(**keys), Loaded(inputs, TOKENS))


def test_a_sample_has_a_number_of_samples_that_no_other_size_has() -> None:
    for shape, count in (((9, 8), 3), ((1, 3, 5), 7), ((4, 3), 5)):
        assert module_cut._sample_count(torch.ones(shape)) == count
    first, second = few_samples((torch.arange(2.0), torch.ones(2, 3)), 5)
    assert first.tolist() == [0, 1, 0, 1, 0]
    assert second.shape == (5, 3)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("torch.nn:MSELoss", "does not take what the module returns, .*float32.*'tuple'"),
        ("rpcmp.losses:masked_lm", "a tensor, or a dict with one as 'logits', is needed"),
        (f"{__name__}:picky", r"\(float32\[3, 3\], float32\[3, 1\]\), .*float32\[3, 3\]: .*expand"),
    ],
)
def test_a_loss_that_wants_something_else_is_refused(loss: str, text: str) -> None:
    config = job().model_copy(update={"loss": Factory(callable=loss)})
    with pytest.raises(ConfigError, match=text):
        cut_module(config)


def test_a_loss_that_needs_numbers_is_not_called_without() -> None:
    config = job().model_copy(update={"loss": Factory(callable=f"{__name__}:reading")})
    assert cut_module(config)[1].layers


def picky(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    difference: torch.Tensor = outputs[0].expand(3, 4) - targets
    return difference.sum()


def test_a_loss_that_asserts_is_not_refused() -> None:
    config = job().model_copy(update={"loss": Factory(callable=f"{__name__}:asserting")})
    assert cut_module(config)[1].layers


def asserting(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    assert not targets.is_meta
    return targets


def reading(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = outputs[0].sum()
    return total / float(targets.sum())


class Growing(nn.Module):
    """Sums its tokens, as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(tokens).cumsum(1))
        return out


def test_a_first_sequence_of_one_token_fixes_no_length() -> None:
    one = torch.ones(3, 1, dtype=torch.int64)
    longer = module_cut.lengthened({"tokens": one, "mask": torch.ones(3, 1), "size": torch.ones(3)})
    assert {name: list(each.shape) for name, each in longer.items()} == {
        "tokens": [3, 9],
        "mask": [3, 9],
        "size": [3],
    }
    assert module_cut.lengthened(torch.ones(3, 1)) is None  # a feature
    assert module_cut.lengthened(torch.ones(3, 5, dtype=torch.int64)) is None
    config = parse_config({"model": {"module": "m:net"}, "loss": "torch.nn:MSELoss"})
    assert config.model is not None
    split = module_cut._split(Growing(), one, config.model, None)
    assert split.inputs[0].sizes == [None, None]
