"""Optimizers from outside of torch and rpcmp: they are restored exactly, or refused.

A restored optimizer continues with the bits of an uninterrupted one. Otherwise it is refused before
the first step.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rpcmp.checkpoint.stage_state import _require_agreement, decoded, pack
from rpcmp.errors import CheckpointError, ConfigError
from rpcmp.worker import rehearsal
from rpcmp.worker.model import StageModel
from rpcmp.worker.optimizer import StageOptimizer
from rpcmp.worker.rehearsal import LARGEST
from tests.support.stageoptimizers import made, state
from tests.zoo import ownoptimizers as optimizers

STEPS, BEFORE = 12, 4

TORCHS = [
    *(
        {"optimizer": f"torch.optim:{name}"}
        for name in torch.optim.__all__
        if isinstance(getattr(torch.optim, name), type)
        and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
    ),
    {"optimizer": {"callable": "torch.optim:SGD", "kwargs": {"momentum": 0.9, "nesterov": True}}},
    {"optimizer": {"callable": "torch.optim:Adam", "kwargs": {"amsgrad": True}}},
    {"optimizer": {"callable": "torch.optim:AdamW", "kwargs": {"fused": True}}},
    {"optimizer": {"callable": "torch.optim:RMSprop", "kwargs": {"centered": True}}},
]

OF_A_PACKAGE = [
    "AdaBelief",
    "Adai",
    "AdEMAMix",
    "Lion",
    "Lamb",
    "Prodigy",
    "Ranger",
    "SM3",
    "SOAP",
    "Shampoo",
    "SCION",
    "ROSE",
    "Tiger",
]


def step(optimizer: StageOptimizer, number: int) -> None:
    """Take a step with random gradients from the seed `number`."""
    generator = torch.Generator().manual_seed(number)
    for parameter in optimizer._parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step_now()


def bits(model: StageModel) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def as_in_a_file(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def require_comes_back(stage: dict[str, Any]) -> None:
    """Check that a stage has the same bits if it is stored and restored in between."""
    model, optimizer = made(stage)
    for number in range(1, STEPS + 1):
        step(optimizer, number)
    before, interrupted = made(stage)
    for number in range(1, BEFORE + 1):
        step(interrupted, number)
    tensors, about = pack(state(before, interrupted))
    stored = {name: as_in_a_file(tensor) for name, tensor in tensors.items()}
    after, restored = made(stage)
    found = decoded(about, stored, list(after.state_dict()), restored.names)
    after.load_state_dict(found.model)
    restored.restore(found)
    for number in range(BEFORE + 1, STEPS + 1):
        step(restored, number)
    expected, got = bits(model), bits(after)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert str(restored.parts()) == str(optimizer.parts())


@pytest.mark.parametrize("stage", TORCHS, ids=str)
def test_every_torch_optimizer_is_restored_exactly(stage: dict[str, Any]) -> None:
    require_comes_back(stage)


@pytest.mark.parametrize("own", optimizers.RESTORED, ids=lambda own: own.__name__)
def test_a_users_optimizer_is_restored_exactly(own: type) -> None:
    require_comes_back({"optimizer": f"{own.__module__}:{own.__name__}"})


@pytest.mark.parametrize("name", OF_A_PACKAGE)
def test_a_packages_optimizer_is_restored_exactly(name: str) -> None:
    require_comes_back({"optimizer": f"pytorch_optimizer:{name}"})


@pytest.mark.parametrize("own", optimizers.REFUSED, ids=lambda own: own.__name__)
def test_an_optimizer_that_cannot_be_restored_is_refused(own: type) -> None:
    with pytest.raises(ConfigError, match=optimizers.REFUSED[own]):
        made({"optimizer": f"{own.__module__}:{own.__name__}"})


def test_an_optimizer_that_refuses_smaller_parameters_is_tried_in_full_size() -> None:
    wide = {"layers": "tests.zoo.models:layers", "kwargs": {"width": 200}}
    model, _ = made({"optimizer": "torch.optim:SGD"}, model=wide)
    sizes = [parameter.numel() for _, parameter in model.named_parameters()]
    assert max(sizes) > LARGEST
    picky = {"callable": "tests.zoo.ownoptimizers:Picky", "kwargs": {"sizes": sizes}}
    made({"optimizer": picky}, model=wide)
    picky["kwargs"] = {"sizes": sizes[:1]}
    with pytest.raises(ConfigError, match="elements"):
        made({"optimizer": picky}, model=wide)


def test_a_changed_attribute_that_no_file_holds_causes_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attribute changes after the warm-up, too late for the rehearsal.

    Attributes that are too large to pickle are not compared.
    """
    monkeypatch.setattr(rehearsal, "MAX_PICKLE_BYTES", 2**16)  # its table is larger
    _, optimizer = made({"optimizer": "tests.zoo.ownoptimizers:LaterHidden"})
    message = []
    for number in range(1, optimizers.WARM_UP + 4):
        step(optimizer, number)
        optimizer.parts()
        message.append([one.getMessage() for one in caplog.records if one.levelname == "WARNING"])
    assert message[optimizers.WARM_UP - 1] == []
    (warning,) = message[-1]
    assert "LaterHidden has changed its attribute 'helper', which no checkpoint holds" in warning


def test_without_recovery_an_optimizer_that_cannot_be_restored_trains() -> None:
    source = {"optimizer": "tests.zoo.ownoptimizers:OwnDice"}
    model, optimizer = made(source, recovery={"enabled": False})
    before = bits(model)
    step(optimizer, 1)
    assert any(not torch.equal(before[name], value) for name, value in bits(model).items())


def test_the_rehearsal_does_not_change_the_stage() -> None:
    torch.manual_seed(3)
    model, optimizer = made({"optimizer": "tests.zoo.ownoptimizers:Nested"})
    plain, _ = made({"optimizer": "torch.optim:SGD"})
    assert all(torch.equal(value, bits(plain)[name]) for name, value in bits(model).items())
    assert optimizer.parts()[0] == {}


def test_state_beside_the_parameters_does_not_fit_another_balance() -> None:
    model, optimizer = made({"optimizer": "tests.zoo.ownoptimizers:Around"})
    step(optimizer, 1)
    whole = copy.deepcopy(state(model, optimizer))
    _require_agreement([whole], "stage0", set(optimizer.names))
    with pytest.raises(CheckpointError, match="fits no other cut"):
        _require_agreement([whole], "stage0", set(optimizer.names[1:]))


def test_an_option_that_every_group_sets_needs_no_default() -> None:
    groups = [
        {"match": ["*.weight"], "use_muon": True, "lr": 0.02},
        {"match": ["*"], "use_muon": False},
    ]
    require_comes_back({"optimizer": {"callable": "pytorch_optimizer:Muon", "groups": groups}})


@pytest.mark.parametrize(
    "name", ["pytorch_optimizer:ScheduleFreeAdamW", "schedulefree:AdamWScheduleFree"]
)
def test_an_optimizer_with_other_weights_for_evaluations_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="has to be told"):
        made({"optimizer": name})


@pytest.mark.long
def test_all_optimizers_of_a_package_are_restored_exactly_or_refused() -> None:
    import pytorch_optimizer  # a slow import

    names = [
        name
        for name, kind in vars(pytorch_optimizer).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    ]
    assert len(names) > 100
    differ = []
    for name in names:
        try:
            require_comes_back({"optimizer": f"pytorch_optimizer:{name}"})
        except ConfigError:  # also if it does not accept a plain list of parameters
            continue
        except AssertionError:
            differ.append(name)
    assert differ == []
