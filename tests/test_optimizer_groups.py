"""Parameter groups of the config: whose they are, what they say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rpcmp import plan
from rpcmp.configfile import parse
from rpcmp.errors import ConfigError
from tests.test_stage_optimizer import made, state

BIASES = {"match": ["*.bias"], "weight_decay": 0.0}
LAST = {"match": ["last.*"], "lr": 0.25}


def adamw(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"callable": "torch.optim:AdamW", "kwargs": {"lr": 0.5}, "groups": list(groups)}


def job(*stages: dict[str, Any], **more: Any) -> Any:
    data = {"loss": "torch.nn:MSELoss", "model": {"layers": "tests.models:layers"}, **more}
    return parse({**data, "stages": list(stages)})


def sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in optimizer._optimizer.param_groups]


def test_the_first_that_matches_holds_and_every_stage_has_all_of_them() -> None:
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


def test_each_groups_rate_is_told() -> None:
    model, optimizer = made({}, optimizer=adamw(LAST, BIASES))
    for _, parameter in model.named_parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step_now()
    assert optimizer.report is not None
    assert optimizer.report.learning_rates == [0.5, 0.25, 0.5]


def test_other_groups_than_those_of_the_checkpoint_are_refused() -> None:
    model, optimizer = made({}, optimizer=adamw(BIASES))
    _, other = made({}, optimizer=adamw(BIASES, LAST))
    with pytest.raises(ConfigError, match="has 2 parameter groups, and AdamW has 3 now"):
        other.restore(state(model, optimizer))


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ({"match": ["*.biass"], "lr": 0.1}, r"'\*.biass' matches no parameter of the unsplit mod"),
        ({"match": ["*.bias"], "weight_decy": 0.1}, "no option 'weight_decy'; did you mean 'weig"),
        ({"match": ["*.bias"]}, "what is different for them"),
        ({"match": [], "lr": 0.1}, "optimizer.groups.0.match"),
        ({"lr": 0.1}, "optimizer.groups.0.match"),
        ({"match": ["*"], "params": [1]}, "`params` is no option"),
        ({"match": ["*"], "lr": object()}, "groups.0"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    group: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan.assign(job({}, {}, optimizer=adamw(group)))


def test_a_stages_arguments_are_no_place_for_groups() -> None:
    with pytest.raises(ConfigError, match="give them in the job's"):
        job({"optimizer": {"lr": 0.1, "groups": [BIASES]}}, optimizer=adamw())
