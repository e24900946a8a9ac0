"""The public API of the library. A change here is a change for its users."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import rpcmp
from rpcmp.driver.evaluation import Evaluation
from rpcmp.errors import RpcmpError
from rpcmp.job.pipeline import Pipeline, PipelineOptimizer

NAMES = [
    "Config",
    "Evaluation",
    "Pipeline",
    "RpcmpError",
    "from_init",
    "init_path",
    "launch",
    "load_config",
    "parameters_sha256",
    "splittable",
]

PIPELINE = {
    "close": "(self) -> 'None'",
    "evaluate": "(self, inputs: 'Any', targets: 'Any') -> 'Evaluation'",
    "forward_backward": "(self, inputs: 'Any', targets: 'Any') -> 'float'",
    "load_state_dict": "(self, state: 'Mapping[str, Tensor]') -> 'None'",
    "parameters_sha256": "(self) -> 'str'",
    "predict": "(self, inputs: 'Any') -> 'Any'",
    "state_dict": "(self) -> 'dict[str, Tensor]'",
    "train_step": "(self, inputs: 'Any', targets: 'Any') -> 'float'",
}

OPTIMIZER = {
    "clip_grad_norm_": "(self, max_norm: 'float', norm_type: 'float' = 2.0) -> 'float'",
    "load_state_dict": "(self, state: 'dict[str, Any]') -> 'None'",
    "state_dict": "(self) -> 'dict[str, Any]'",
    "step": "(self) -> 'bool'",
    "step_scheduler": "(self, loss: 'float' = 0.0) -> 'None'",
    "zero_grad": "(self) -> 'None'",
}

FUNCTIONS = {
    "launch": "(config: 'Config', connect: 'Sequence[str] | None' = None) -> 'Pipeline'",
    "load_config": "(path: 'str | Path', overrides: 'Sequence[str]' = ()) -> 'Config'",
    "parameters_sha256": "(state_dict: 'Mapping[str, torch.Tensor]') -> 'str'",
    "splittable": "(operation: 'Operation') -> 'Operation'",
}


def test_the_public_names_do_not_change() -> None:
    assert rpcmp.__all__ == NAMES
    assert set(dir(rpcmp)) == {*NAMES, "__version__"}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(rpcmp, name))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rpcmp' has no attribute 'lunch'"):
        rpcmp.lunch  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_arguments_of_public_functions_do_not_change(name: str) -> None:
    assert str(inspect.signature(getattr(rpcmp, name))) == FUNCTIONS[name]


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: member
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("kind", "methods"), [(Pipeline, PIPELINE), (PipelineOptimizer, OPTIMIZER)]
)
def test_the_methods_of_public_classes_do_not_change(kind: type, methods: dict[str, str]) -> None:
    found = public_methods(kind)
    assert {name: str(inspect.signature(found[name])) for name in sorted(found)} == methods
    assert all(method.__doc__ for method in found.values())


def test_a_pipeline_is_a_context_manager() -> None:
    assert hasattr(Pipeline, "__enter__")
    assert hasattr(Pipeline, "__exit__")


def test_the_fields_of_an_evaluation_do_not_change() -> None:
    fields = [(name, str(kind)) for name, kind in Evaluation.__annotations__.items()]
    assert fields == [
        ("num_samples", "int"),
        ("loss", "float"),
        ("metrics", "dict[str, float]"),
        ("weight", "float | None"),
    ]


def test_all_errors_can_be_caught_as_one() -> None:
    assert rpcmp.RpcmpError is RpcmpError


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import rpcmp, sys; rpcmp.load_config, rpcmp.Config; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True, timeout=60) == "False\n"
