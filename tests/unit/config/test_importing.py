"""Resolve "module:callable" and call the result."""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path
from typing import Any

import numpy.random
import pytest
import torch
from torch import nn

from rpcmp.config import importing
from rpcmp.config.types import Factory
from rpcmp.errors import FactoryError, StageError
from rpcmp.pipelining import random_streams
from tests.zoo import models


def named(name: str, **kwargs: Any) -> Factory:
    """A factory of tests.zoo.models, or any "module:callable"."""
    return Factory(callable=name if ":" in name else f"tests.zoo.models:{name}", kwargs=kwargs)


def test_a_name_resolves_to_the_object() -> None:
    assert importing.resolve("tests.zoo.models:layers", "model.layers") is models.layers
    assert importing.resolve("torch:Tensor.add", "loss") is torch.Tensor.add


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.zoo.models:no_such_name", "AttributeError: .*no_such_name'$"),
        ("tests.zoo.models:layrs", "no attribute 'layrs'; did you mean 'layers'[?]$"),
        ("torch.nn:CrosEntropyLoss", "; did you mean 'CrossEntropyLoss'[?]$"),
        ("tests.zoo.models:FEATURES", "is int, not callable"),
    ],
)
def test_a_name_that_does_not_resolve_says_why(name: str, message: str) -> None:
    with pytest.raises(FactoryError, match=f"loss = '{name}'.*{message}"):
        importing.resolve(name, "loss")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("width = 3\nwidth.oops", r"no attribute 'oops'.*line 2.*width\.oops"),
        ("raise AttributeError('lost')", "does not import: AttributeError: .*line 1"),
        ("setattr(range(3), 'start', 1)", "does not import: AttributeError: .*line 1"),
    ],
)
def test_a_module_that_raises_on_import_shows_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    (tmp_path / "raises_on_import.py").write_text(f"{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FactoryError, match=f"(?s){message}"):
        importing.resolve("raises_on_import:f", "loss")


def test_what_a_module_draws_is_the_same_whenever_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import random, numpy, torch\n"
    text += "TABLE = random.random(), float(numpy.random.rand()), float(torch.rand(()))\n"
    (tmp_path / "drawing_at_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for seed in (1, 2):
        monkeypatch.delitem(sys.modules, "drawing_at_import", raising=False)
        random_streams.seed_plainly(seed)
        found.append(importing.import_module("drawing_at_import").TABLE)
        monkeypatch.delitem(sys.modules, "drawing_at_import")
        after = random.random(), float(numpy.random.rand()), float(torch.rand(()))
        random_streams.seed_plainly(seed)
        assert after == (random.random(), float(numpy.random.rand()), float(torch.rand(())))
    assert found[0] == found[1]


def test_a_factory_gets_positional_and_configured_arguments() -> None:
    made = importing.create(named("torch.optim:SGD", lr=0.5), "optimizer", [torch.ones(1)])
    assert made.param_groups[0]["lr"] == 0.5


def test_a_factory_that_raises_shows_the_users_lines_only() -> None:
    with pytest.raises(FactoryError) as caught:
        importing.create(named("raising"), "data.train")
    message = str(caught.value)
    assert "data.train = 'tests.zoo.models:raising' failed: ValueError: out of order\n" in message
    assert "models.py" in message
    assert "importing.py" not in message


def test_a_factory_that_exits_is_an_error() -> None:
    with pytest.raises(FactoryError, match=r"data\.train = 'sys:exit' failed: SystemExit"):
        importing.create(Factory(callable="sys:exit"), "data.train")


def test_wrong_arguments_are_refused_before_the_call() -> None:
    with pytest.raises(FactoryError, match="unexpected keyword argument 'depth'"):
        importing.create(named("layers", depth=3), "model.layers")
    with pytest.raises(FactoryError, match="'scael'"):
        importing.load_function(named("mean_absolute_error", scael=2.0), "loss")


@pytest.mark.parametrize(
    ("source", "num_args", "message"),
    [
        (named("tests.zoo.ownoptimizers:MyOpt", lrr=1), 1, r"'lrr'; did you mean 'lr'\? \(there "),
        (named("torch.optim.lr_scheduler:StepLR", stepsize=1), 1, "did you mean 'step_size'"),
        (named("torch.nn:CrossEntropyLoss", label_smothing=0.1), 0, "mean 'label_smoothing'"),
        (named("mean_absolute_error", scael=2.0), 0, "'scael'; did you mean 'scale'"),
        (named("torch.optim:SGD", params=[]), 1, "unexpected keyword argument 'params'"),
        (named("returned", lr=1), 0, "unexpected keyword argument 'lr'$"),
    ],
)
def test_a_misspelt_argument_suggests_the_nearest(
    source: Factory, num_args: int, message: str
) -> None:
    with pytest.raises(FactoryError, match=message):
        importing.resolve_factory(source, "it", num_args)


def test_arguments_of_a_decorator_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(models.dataset)
    def decorated(*args: Any, verbose: bool = False, **kwargs: Any) -> Any:
        return models.dataset(*args, **kwargs)

    monkeypatch.setattr(models, "returned", decorated)
    assert len(importing.create(named("returned", verbose=True), "data.train", 3)) == 3
    with pytest.raises(FactoryError, match=r"failed: TypeError: .*'oops'"):
        importing.create(named("returned", oops=True), "data.train")


def test_errors_of_rpcmp_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    error = StageError("a", "build", "why")

    def fail() -> None:
        raise error

    monkeypatch.setattr(models, "raising", fail)
    with pytest.raises(StageError) as caught:
        importing.create(named("raising"), "loss")
    assert caught.value is error


def test_a_class_of_functions_is_built_once() -> None:
    loss = importing.load_function(named("torch.nn:MSELoss", reduction="sum"), "loss")
    assert isinstance(loss, nn.MSELoss)
    assert loss.reduction == "sum"


def test_a_function_gets_its_arguments_in_every_call() -> None:
    loss = importing.load_function(named("mean_absolute_error", scale=2.0), "loss")
    assert loss(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])) == 2.0
