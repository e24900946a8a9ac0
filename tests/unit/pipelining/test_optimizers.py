"""Parameter groups of the config: their stages, options and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rpcmp.config.loader import parse_config
from rpcmp.errors import ConfigError
from rpcmp.pipelining import assignment
from tests.support.stageoptimizers import made, state

BIASES = {"match": ["*.bias"], "weight_decay": 0.0}
LAST = {"match": ["last.*"], "lr": 0.25}


def adamw(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"callable": "torch.optim:AdamW", "kwargs": {"lr": 0.5}, "groups": list(groups)}


def job(*stages: dict[str, Any], **more: Any) -> Any:
    data = {"loss": "torch.nn:MSELoss", "model": {"layers": "tests.zoo.models:layers"}, **more}
    return parse_config({**data, "stages": list(stages)})


def sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer._optimizer.param_groups]


def test_the_first_matching_group_applies_and_every_stage_has_all_groups() -> None:
    found = [made({}, {}, of=index, optimizer=adamw(LAST, BIASES))[1] for index in range(2)]
    assert [sizes(optimizer) for optimizer in found] == [[1, 0, 1], [1, 2, 1]]
    for optimizer in found:
        options = [(g["lr"], g["weight_decay"]) for g in optimizer._optimizer.param_groups]
        assert options == [(0.5, 0.01), (0.25, 0.01), (0.5, 0.0)]


def test_a_stage_has_options_of_its_own_and_the_jobs_groups() -> None:
    _, optimizer = made({"optimizer": {"lr": 0.125}}, optimizer=adamw(BIASES))
    assert [g["lr"] for g in optimizer._optimizer.param_groups] == [0.125, 0.125]
    own = {"callable": "torch.optim:SGD", "groups": [{"match": ["*"], "lr": 1.0}]}
    _, optimizer = made({"optimizer": own}, optimizer=adamw(BIASES))
    assert sizes(optimizer) == [6]


def test_each_groups_learning_rate_is_reported() -> None:
    model, optimizer = made({}, optimizer=adamw(LAST, BIASES))
    for _, parameter in model.named_parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step_now()
    assert optimizer.report is not None
    assert optimizer.report.learning_rates == [0.5, 0.25, 0.5]


def test_groups_that_differ_from_the_checkpoint_are_refused() -> None:
    model, optimizer = made({}, optimizer=adamw(BIASES))
    _, other = made({}, optimizer=adamw(BIASES, LAST))
    with pytest.raises(ConfigError, match="has 2 parameter groups, and AdamW has 3 now"):
        other.restore(state(model, optimizer))


TIED = [["first.0.bias", "middle.0.bias"]]


@pytest.mark.parametrize("name", ["middle.0.bias", "first.0.b*"])
def test_the_owner_of_a_tied_parameter_matches_it_by_any_of_its_names(name: str) -> None:
    groups = adamw({"match": [name], "lr": 0.25}, {"match": ["first.*"], "lr": 0.125})
    found = [made({}, {}, of=index, tied=TIED, optimizer=groups)[1] for index in range(2)]
    assert [sizes(optimizer) for optimizer in found] == [[0, 1, 1], [3, 0, 0]]


def test_the_first_group_with_a_matching_name_applies() -> None:
    groups = adamw({"match": ["first.*"], "lr": 0.125}, {"match": ["middle.0.b*"], "lr": 0.25})
    _, optimizer = made({}, {}, tied=TIED, optimizer=groups)
    assert sizes(optimizer) == [0, 2, 0]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"match": ["*.biass"], "lr": 0.1}, r"'\*.biass' matches no parameter of the unsplit mod"),
        ({"match": ["*.bias"], "weight_decy": 0.1}, "no option 'weight_decy'; did you mean 'weig"),
        ({"match": ["*"], "weight_decy": 0.1}, "no option 'weight_decy'; did you mean 'weig"),
        ({"match": ["*.bias"]}, "needs at least one option"),
        ({"match": [], "lr": 0.1}, "optimizer.groups.0.match"),
        ({"lr": 0.1}, "optimizer.groups.0.match"),
        ({"match": ["*"], "params": [1]}, "`params` is not an option"),
        ({"match": ["*"], "lr": object()}, "groups.0"),
    ],
)
def test_a_group_that_does_not_fit_is_refused_before_anything_starts(
    group: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assignment.assign(job({}, {}, optimizer=adamw(group)))


def test_an_option_that_all_groups_misspell_is_refused() -> None:
    groups = [{"match": [pattern], "weight_decy": 0.1} for pattern in ("*.bias", "*")]
    with pytest.raises(ConfigError, match=r"groups.0: .* no option 'weight_decy'"):
        assignment.assign(job({}, {}, optimizer=adamw(*groups)))


OWN = {"callable": "torch.optim:SGD", "groups": [{"match": ["first.*", "last.*"], "lr": 1.0}]}


@pytest.mark.parametrize(
    ("stages", "more", "message"),
    [
        (
            [{}, {"frozen": True}],
            {"optimizer": adamw(LAST)},
            r"optimizer.groups.0: 'last.\*' matches frozen parameters only, such as 'last.weight'",
        ),
        (
            [{}, {"optimizer": "torch.optim:SGD"}],
            {"optimizer": adamw(LAST)},
            "nothing that it trains: 'last.weight' is trained by the optimizer of stage 'stage1'",
        ),
        (
            [{"optimizer": OWN}, {}],
            {},
            r"stages.0.optimizer.groups.0: 'last.\*' .* 'last.weight' is trained by the job's opt",
        ),
        (
            [{}, {"optimizer": {**OWN, "groups": [{"match": ["middle.0.bias"], "lr": 1.0}]}}],
            {"tied": TIED},
            "'middle.0.bias', tied to 'first.0.bias', is trained by the job's optimizer",
        ),
        (
            [{"frozen": True}, {"frozen": True}],
            {"tied": TIED, "optimizer": adamw({"match": ["middle.0.bias"], "lr": 1.0})},
            "frozen parameters only, such as 'middle.0.bias'",
        ),
    ],
)
def test_a_pattern_without_a_parameter_in_its_optimizer_is_refused_with_the_owner(
    stages: list[dict[str, Any]], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        assignment.assign(job(*stages, **more))


# Optimizers that accept only some parameters


def matrices(name: str, of: int = 0) -> tuple[Any, Any]:
    model = {"layers": "tests.zoo.models:matrices", "balance": [1, 1]}
    return made({}, {}, of=of, model=model, optimizer=f"torch.optim:{name}")


@pytest.mark.parametrize(("name", "of"), [("Muon", 0), ("Muon", 1), ("SparseAdam", 0)])
def test_an_optimizer_of_matrices_or_sparse_gradients_resumes_exactly(name: str, of: int) -> None:
    model, optimizer = matrices(name, of)
    for _, parameter in model.named_parameters():
        grad = torch.ones_like(parameter)
        parameter.grad = grad.to_sparse(1) if name == "SparseAdam" else grad
    before = copy.deepcopy(model.state_dict())
    optimizer.step_now()
    assert all(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    _, other = matrices(name, of)
    other.restore(state(model, optimizer))
    assert str(other.parts()) == str(optimizer.parts())


def test_the_parameter_is_named_that_an_optimizer_does_not_take() -> None:
    message = r"only supports 2D .*; it does not take 'first.0.bias': give this stage an"
    with pytest.raises(ConfigError, match=message):
        made({}, {}, optimizer="torch.optim:Muon")
    with pytest.raises(ConfigError, match=r"'middle.0.bias' and 1 more: give"):
        made({}, {}, of=1, optimizer={"callable": "torch.optim:Muon", "groups": [LAST]})


def test_an_optimizer_that_computes_the_loss_again_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS: its step needs a closure"):
        matrices("LBFGS")


def test_groups_among_the_arguments_of_a_stage_are_refused() -> None:
    with pytest.raises(ConfigError, match="give them in the job's"):
        job({"optimizer": {"lr": 0.1, "groups": [BIASES]}}, optimizer=adamw())
