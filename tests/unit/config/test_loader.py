"""Reading configs from TOML: overrides, and errors with their position and a suggestion."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from rpcmp.config import loader
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory, OptimizerFactory
from rpcmp.errors import ConfigError
from tests.support import places

EXAMPLES = sorted(places.EXAMPLES.glob("*.toml"))

TOML = """
num_microbatches = 8
loss = "torch.nn:CrossEntropyLoss"

[model]
layers = "m:layers"
balance = [1, 2]

[[stages]]
name = "first"

[[stages]]
optimizer = { lr = 0.5 }

[optimizer]
callable = "torch.optim:AdamW"
kwargs = { lr = 1e-3 }

[data]
train = "m:train"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "digits.toml"
    file.write_text(TOML)
    return file


def test_a_file_gives_its_folder_and_its_name(path: Path) -> None:
    config = loader.load_config(path)
    assert (config.name, config.folder) == ("digits", path.parent)
    assert (config.num_microbatches, config.stage_names) == (8, ["first", "stage1"])


def test_a_name_in_the_file_wins(path: Path) -> None:
    path.write_text('name = "other"\n' + TOML)
    assert loader.load_config(str(path)).name == "other"


@pytest.mark.parametrize(
    ("stem", "name"), [("my.run v2", "my-run-v2"), ("a_b-c", "a_b-c"), ("modèle", "mod-le")]
)
def test_the_name_of_any_file_makes_a_valid_name(tmp_path: Path, stem: str, name: str) -> None:
    file = tmp_path / f"{stem}.toml"
    file.write_text(TOML)
    assert loader.load_config(file).name == name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(example: Path) -> None:
    assert loader.load_config(example).data is not None


def changed(path: Path, overrides: Sequence[str]) -> dict[str, object]:
    """Return the keys that overrides change, and their new values."""
    before, after = dict(loader.load_config(path)), dict(loader.load_config(path, overrides))
    return {key: after[key] for key in Config.model_fields if after[key] != before[key]}


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("seed=3", "seed", 3),
        (" seed =3", "seed", 3),
        ("name=run2", "name", "run2"),  # no TOML: a string
        ('name="run2"', "name", "run2"),
        ("ship_code=false", "ship_code", False),
        ("max_grad_norm=1e-1", "max_grad_norm", 0.1),
        ("loss=m:other", "loss", Factory(callable="m:other")),
        (
            "loss.kwargs.reduction=sum",  # of a factory in its short form
            "loss",
            Factory(callable="torch.nn:CrossEntropyLoss", kwargs={"reduction": "sum"}),
        ),
        (
            "optimizer.kwargs.betas=[0.8, 0.9]",
            "optimizer",
            OptimizerFactory(
                callable="torch.optim:AdamW", kwargs={"lr": 1e-3, "betas": [0.8, 0.9]}
            ),
        ),
        (
            'optimizer={callable="m:o", kwargs={lr=1}}',
            "optimizer",
            OptimizerFactory(callable="m:o", kwargs={"lr": 1}),
        ),
        ("metrics.accuracy=m:a", "metrics", {"accuracy": Factory(callable="m:a")}),
    ],
)
def test_an_override_changes_one_key(path: Path, override: str, key: str, expected: object) -> None:
    assert changed(path, [override]) == {key: expected}


def test_overrides_reach_into_lists(path: Path) -> None:
    overrides = ["model.balance.0=4", "stages.1.device=cuda:0", "stages.0={name='new'}"]
    config = loader.load_config(path, overrides)
    assert config.model is not None
    assert config.model.balance == [4, 2]
    assert config.stage(1).device == "cuda:0"
    assert config.stage(0).name == "new"
    assert config.stage(1).optimizer == {"lr": 0.5}


def test_an_override_cannot_change_an_element_of_an_empty_list(path: Path) -> None:
    with pytest.raises(ConfigError, match="'0' would be an element of an empty list"):
        loader.load_config(path, ["tied=[]", "tied.0=x"])


def test_the_last_override_wins(path: Path) -> None:
    assert loader.load_config(path, ["seed=1", "seed=2"]).seed == 2


def test_an_override_makes_a_section_that_the_file_lacks(path: Path) -> None:
    config = loader.load_config(path, ["data.test.callable=m:t", "data.test.kwargs.n=3"])
    assert config.data is not None
    assert config.data.test == Factory(callable="m:t", kwargs={"n": 3})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "write key=value"),
        ("=3", "write key=value"),
        ("data.=3", "write key=value"),
        ("sede=3", "sede: unknown key; did you mean 'seed'"),
        ("seed=x", r"seed: must be an integer \(got 'x'\)"),
        ("report=m:write=x", "report.callable: .*got 'm:write=x'"),
        ("seed=", r"seed: must be an integer \(got ''\)"),
        ("seed=1e3", r"seed: must be an integer \(got 1000.0\)"),
        ("seed=1\nepochs=7", "seed: must be an integer"),
        (f"seed={2**63}", rf"seed: must be less than {2**63} \(got {2**63}\)"),
        ("epochs=0", r"epochs: must be 1 or more \(got 0\)"),
        ("max_grad_norm=0", r"max_grad_norm: must be more than 0 \(got 0\)"),
        ("ship_code=1", r"ship_code: must be true or false \(got 1\)"),
        ("name=1", r"name: must be a string \(got 1\)"),
        ("schedule=x", r"schedule: must be 'gpipe', '1f1b', 'zero-bubble' or 'auto' \(got 'x'\)"),
        ("metrics.balance=3", r"metrics.balance: must be a table \(got 3\)"),
        ("model.balance=x", r"model.balance: must be a list of integers or 'auto' \(got 'x'\)"),
        ("stages.0.kwargs=3", r"stages.0.kwargs: must be a table \(got 3\)"),
        ("data=3", r"data: must be a table \(got 3\)"),
        ("tied=3", r"tied: must be a list \(got 3\)"),
        ("num_microbatches.x=1", "'num_microbatches' is a value, not a table"),
        ("stages.2.device=cpu", "'2' is not one of 0 to 1"),
        ("stages.x.device=cpu", "'x' is not one of 0 to 1"),
        ("model.balance.2=1", "'2' is not one of 0 to 1"),
        ("model.balance.0.x=1", "'0' is a value, not a table"),
        ("seed=" + "[" * 10_000, "the value is nested too deeply"),
        ("seed=" + "1" * 5000, "seed: must be an integer"),
        ("stages." + "1" * 5000 + ".device=cpu", "is not one of 0 to 1"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader.load_config(path, [override])


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("num_microbatchs = 2", "num_microbatchs: unknown key; did you mean 'num_microbatches'"),
        ("[data]\nbatchsize = 2\ntrain = 'm:t'", "data.batchsize: .* did you mean 'batch_size'"),
        ("[data.test]\ncallabel = 'm:t'", "data.test.callabel: .* did you mean 'callable'"),
        ("[[stages]]\nthread = 2", "stages.0.thread: .* did you mean 'threads'"),
        ("[metrics.a]\nkwarg = {}", "metrics.a.kwarg: .* did you mean 'kwargs'"),
        ("batchsize = 3", "batchsize: unknown key; did you mean 'batch_size' in .data."),
        (
            "[model]\nzzz = 1",
            "model.zzz: unknown key; valid keys: module, layers, kwargs, split, i",
        ),
        ("[data]", "data.train: missing"),
        ("epochs = 1", "loss: missing"),
        ("data = 3", "data: .*got 3"),
    ],
)
def test_an_error_names_the_key_and_the_nearest_valid_one(
    tmp_path: Path, toml: str, message: str
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=f"{file} has errors:(.|\n)*{message}"):
        loader.load_config(file)


def test_all_errors_are_reported_at_once() -> None:
    data = tomllib.loads("seed = 'x'\nepochs = 0\nscedule = 'gpipe'\n[model]\nlayers = 'm:l'")
    with pytest.raises(ConfigError) as caught:
        loader.parse_config(data)
    lines = str(caught.value).splitlines()
    assert [line.strip().split(":")[0] for line in lines[1:]] == [
        "seed",
        "epochs",
        "loss",
        "scedule",
    ]


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml: No such file"):
        loader.load_config(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"seed = ", b"seed = 1\nseed = 2", b"name = '\xff'"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad.toml is not valid TOML: "):
        loader.load_config(file)
