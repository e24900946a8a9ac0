"""`rpcmp new`: files that run unchanged, and names that are refused."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from rpcmp import metrics
from rpcmp.cli.new import EXAMPLES, create, examples
from rpcmp.config import loader
from rpcmp.data.loading import training_batches
from rpcmp.errors import ConfigError
from tests.support.commandlines import parsed
from tests.support.cuts import cut_here
from tests.support.localgroup import unsplit
from tests.support.processes import rpcmp


def test_the_new_job_trains_with_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first epoch on stages, and the whole training in one process, by which it learns."""
    monkeypatch.chdir(tmp_path)
    made = rpcmp("new", "spirals")
    assert made.code == 0, made.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spirals.py", "spirals.toml"]
    commands = [shlex.split(line) for line in re.findall(r"(?m)^  rpcmp (.*?) +#", made.out)]
    assert [command[:2] for command in commands] == [
        [command, "spirals.toml"] for command in ("drive", "verify", "doctor")
    ]
    for command in commands:
        parsed(command)
    driven = rpcmp(*commands[0], "--json", "--set", "epochs=1")
    assert driven.code == 0, driven.err
    assert driven.event("summary")["metrics"]["accuracy"] > 1 / 3
    config = loader.load_config(tmp_path / "spirals.toml")
    assert config.epochs is not None
    assert config.data is not None
    assert config.data.test is not None
    assert config.model is not None
    monkeypatch.syspath_prepend(tmp_path)
    steps = config.epochs * len(training_batches(config))
    job = loader.load_config(tmp_path / "spirals.toml", [f"steps={steps}"])
    whole = unsplit(cut_here(job))
    assert driven.losses == list(whole.losses)[: steps // config.epochs]
    written = importlib.import_module("spirals")
    del sys.modules["spirals"]
    model = written.Net(**config.model.kwargs)
    model.load_state_dict(whole.state)
    points, spirals = written.dataset(**config.data.test.kwargs).tensors
    assert metrics.accuracy(model.eval()(points), spirals) > 0.9


def test_the_settings_that_are_commented_out_are_valid(tmp_path: Path) -> None:
    _, path = create("spirals", tmp_path)
    text = re.sub(r"(?m)^#(?! |$)", "", path.read_text())
    text = text.replace("epochs = 10 ", "steps = 200 ")
    path.write_text(text)
    config = loader.load_config(path)
    assert config.addresses == ["host-a:50051", "host-b:50052"]
    assert config.checkpoint is not None
    assert config.tensorboard_folder == tmp_path / "curves"
    assert (config.steps, config.schedule, config.num_stages) == (200, "zero-bubble", 2)


@pytest.mark.parametrize("example", examples())
@pytest.mark.parametrize("name", ["mine", "spirals", "digits"])
def test_a_job_may_start_as_an_example(tmp_path: Path, example: str, name: str) -> None:
    model, path = create(name, tmp_path, example)
    assert model.read_text() == (EXAMPLES / f"{example}.py").read_text()
    own = {
        name for name in loader.load_config(path).modules if not name.startswith(("torch", "rpcmp"))
    }
    assert own == {name}
    assert f"rpcmp drive {name}.toml" in path.read_text()
    assert "rpcmp/examples" not in path.read_text()


def test_new_overwrites_no_file(tmp_path: Path) -> None:
    create("mine", tmp_path)
    (tmp_path / "mine.py").unlink()
    (tmp_path / "mine.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine.toml is there already: choose another name"):
        create("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
    assert (tmp_path / "mine.toml").read_text() == "mine"


def test_a_name_may_be_any_that_python_takes(tmp_path: Path) -> None:
    assert create("größe", tmp_path) == [tmp_path / "größe.py", tmp_path / "größe.toml"]
    assert 'module = "größe:Net"' in (tmp_path / "größe.toml").read_text()
    config = loader.load_config(tmp_path / "größe.toml", ["epochs=1"])
    assert config.name == "gr--e"  # what files and hosts are called by is plain


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-model", "'my-model' cannot be a Python module's name"),
        ("2d", "cannot be a Python module's name"),
        ("class", "cannot be a Python module's name"),
        ("../out", "cannot be a Python module's name"),
        ("", "cannot be a Python module's name"),
        ("torch", r"there is a module 'torch' already \(.*\), which torch.py would hide"),
        ("json", "there is a module 'json' already"),
    ],
)
def test_invalid_names_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_example_and_an_unwritable_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no example 'resnet': choose one of .*resnet50"):
        create("mine", tmp_path, "resnet")
    with pytest.raises(ConfigError, match=r"cannot write .*mine\.py: No such file"):
        create("mine", tmp_path / "nowhere")
