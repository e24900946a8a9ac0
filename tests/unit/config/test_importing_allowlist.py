"""A job may name only what its host allows, and nothing that is defined elsewhere."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch
from torch import nn

from rpcmp.cli.new import examples
from rpcmp.config import importing
from rpcmp.config.importing import BUILT_IN
from rpcmp.errors import FactoryError

PACKAGE = """
import functools, os, subprocess, sys, torch
from os import system
from torch import nn
from torch.nn import Linear

class Net(nn.Sequential):
    run = staticmethod(system)
    module = os
    class Inner: ...
    @classmethod
    def small(cls): return cls()
    def __call__(self): ...

def layers(canary=None): return [("only", lambda: nn.Linear(2, 2))]
build = Net
partial = functools.partial(system, "true")
small = functools.partial(Net)
instance = Net()
bound = instance.forward
value = 3
sys.modules[__name__ + ".alias"] = torch
def __getattr__(name):
    if name == "lazy": return os
    raise AttributeError(name)
"""


def test_every_example_that_needs_no_transformers_is_built_in() -> None:
    built_in = {name for name in BUILT_IN if name.startswith("rpcmp.examples.")}
    others = {"rpcmp.examples.llama", "rpcmp.examples.finetune"}
    assert built_in == {f"rpcmp.examples.{name}" for name in examples()} - others


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that imports what it does not define; its name. Names are limited to it."""
    name = f"allowed_{uuid.uuid4().hex[:8]}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    (tmp_path / name / "__main__.py").write_text("raise SystemExit('was run')")
    (tmp_path / name / "deep.py").write_text("from . import Net\ndef f(): ...\n")
    (tmp_path / f"{name}_too.py").write_text("def f(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    importing.set_allow_list([name])
    yield name
    importing.set_allow_list(None)


@pytest.mark.parametrize(
    "attribute",
    [":layers", ":Net", ":build", ":Net.Inner", ":Net.small", ".deep:f", ".deep:Net", ":deep.f"],
)
def test_a_name_that_an_allowed_module_defines_is_unpickled(package: str, attribute: str) -> None:
    if attribute == ":deep.f":
        importing.resolve(f"{package}.deep:f", "loss")  # imports it
    assert callable(importing.resolve(f"{package}{attribute}", "loss"))


@pytest.mark.parametrize(
    "name",
    [
        *("{}:torch.os.system", "{}:os.system", "{}:system", "{}:Linear", "{}:nn.Linear", "{}:os"),
        *("{}:Net.run", "{}:Net.module.system", "{}:Net.forward", "{}:Net.mro", "{}:Net.load"),
        *("{}:partial", "{}:small", "{}:instance", "{}:bound", "{}:value", "{}:lazy.system"),
        *("{}:layers.__globals__", "{}:Net.__init__.__builtins__", "{}:Net.__class__", "{}:deep"),
        *("{}.__main__:f", "{}.alias:load", "{}.alias.utils.cpp_extension:load", "{}_too:f"),
        *("{}.os:system", "{}/../os:system", "os:system", "pty:spawn", "builtins:exec", "tests:x"),
        *("torch:load", "torch.nn:DataParallel", "torch.nn:Module.__init__", "torch.nn:Parameter"),
        *("torch.nn.functional:importlib", "torch.nn:functional.math.sin", "torch.hub:load"),
        *(
            "rpcmp.config.importing:create",
            "rpcmp.metrics:keeps_state",
            "rpcmp.examples.llama:net",
        ),
        "rpcmp.examples.encoder_decoder:text_of",
    ],
)
def test_a_name_that_is_defined_elsewhere_is_refused(package: str, name: str) -> None:
    with pytest.raises(FactoryError):
        importing.resolve(name.format(package), "loss")


@pytest.mark.parametrize(
    "name",
    [
        *("torch.nn:MSELoss", "torch.nn:Linear", "torch.nn.functional:cross_entropy"),
        *("torch.optim:AdamW", "torch.optim:Adafactor", "torch.optim.lr_scheduler:OneCycleLR"),
        *("rpcmp.metrics:accuracy", "rpcmp.examples.digits:layers", "rpcmp.examples.unet:Down"),
    ],
)
def test_callables_that_training_needs_are_always_allowed(package: str, name: str) -> None:
    assert callable(importing.resolve(name, "loss"))


def test_messages_import_only_what_is_allowed(package: str) -> None:
    assert importing.filter_allowed(["pty", package, "torch.nn"]) == [package, "torch.nn"]


STEPS = (
    *("torch", "os", "system", "nn", "Net", "layers", "deep", "f", "run", "module", "instance"),
    *("bound", "partial", "lazy", "alias", "functional", "__class__", "__globals__", "__dict__"),
    *("__init__", "__builtins__", "mro", "forward", "sys", "modules", "subprocess", "Popen"),
    *("optim", "Linear", "utils", "load", "Inner", "small", "functools", "", "..", "/", "\0", "ﬁ"),
)


def test_five_thousand_names_resolve_to_nothing_else(package: str) -> None:
    """Each is refused, or is a function or class that the package, or the fixed list, defines."""
    draw = random.Random(5)
    heads = [package, f"{package}.deep", f"{package}.alias", "torch.nn", "torch.optim", "os", "pty"]
    found = []
    for number in range(5000):
        steps = draw.choices(STEPS, k=draw.choice([1, 1, 1, 2, 3, 4, 5]))
        if number % 50 == 0:
            steps.append("".join(draw.choices(string.ascii_letters + "é\u0130ª", k=5000)))
        if draw.random() < 0.2:
            steps[0] = draw.choice([*dir(nn), *dir(torch.optim)])
        middle = draw.choice(["", "", "", "", f".{draw.choice(STEPS)}"])
        name = f"{draw.choice(heads)}{middle}:{'.'.join(steps)}"
        try:
            found.append((name, importing.resolve(name, "loss")))
        except FactoryError:
            continue
    assert len(found) > 20
    for name, target in found:
        home = getattr(target, "__func__", target)
        assert isinstance(home, FunctionType | type), name
        top = f"{home.__module__}.".startswith((f"{package}.", "torch.nn.modules.", "torch.optim."))
        assert top or home.__module__ == "torch.nn.functional", name
        assert not isinstance(target, ModuleType)
