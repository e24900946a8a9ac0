"""Valid and invalid configs, and their defaults."""

from __future__ import annotations

import copy
import datetime
import math
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError

from rpcmp.config import topology
from rpcmp.config.job_sections import JobSettings, ModelCut, StageConfig
from rpcmp.config.loader import descriptions, level_of, parse_config
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory, OptimizerFactory
from rpcmp.errors import ConfigError
from rpcmp.pipelining import schedule

LAYERS: dict[str, Any] = {"loss": "m:loss", "model": {"layers": "m:layers"}}
BRANCHES: dict[str, Any] = {
    "loss": "m:loss",
    "stages": [
        {"name": "image", "module": "m:Image", "inputs": ["input.image"]},
        {"name": "text", "module": "m:Text", "inputs": ["input.text"]},
        {"name": "head", "module": "m:Head", "inputs": ["image", "text"]},
    ],
}


def layers(*stages: dict[str, Any], **model: Any) -> dict[str, Any]:
    """A config with [model] and these [[stages]]."""
    return {**LAYERS, "model": {"layers": "m:layers", **model}, "stages": list(stages)}


def branches(index: int, **stage: Any) -> dict[str, Any]:
    """BRANCHES with settings of one stage changed."""
    changed = copy.deepcopy(BRANCHES)
    changed["stages"][index].update(stage)
    return changed


SECTIONS: dict[type[BaseModel], None] = dict.fromkeys(
    section
    for section in (JobSettings, *(level_of(f).section for f in JobSettings.model_fields.values()))
    if section is not None
)


MODULE = {"loss": "m:loss", "model": {"module": "m:Net"}}


def test_a_cut_names_the_parameters_of_a_module() -> None:
    config = parse_config(MODULE)
    assert config.is_to_be_cut
    cut = ModelCut(
        layers=["a", "b", "c"],
        tied=[["a.w", "c.w", "a.w@1"]],
        aliases={"a.w": ["d.w"], "c.w": ["e.w"], "b.x": ["b.y"]},
        split="",
    )
    whole = config.with_cut(cut)
    assert not whole.is_to_be_cut
    assert whole.tied_to == {"c.w": "a.w", "a.w@1": "a.w"}
    assert whole.other_names == {"c.w": "a.w", "d.w": "a.w", "e.w": "a.w", "b.y": "b.x"}
    assert whole.prefix_of("b") == ""
    assert Config.model_validate_json(whole.model_dump_json()) == whole


def test_a_copy_for_measurements_keeps_nothing() -> None:
    config = parse_config({**LAYERS, "checkpoint": {"dir": "saved"}})
    assert config.takes_snapshots
    measured = config.without_recovery()
    assert not measured.takes_snapshots
    assert measured.checkpoint is None


def test_the_memory_of_a_stage_is_a_number_of_bytes() -> None:
    assert StageConfig(memory="1.5 GiB").memory_bytes == 3 * 2**29
    assert StageConfig().memory_bytes is None


def test_the_defaults_of_loss_scaling_equal_those_of_torch() -> None:
    ours = parse_config({**LAYERS, "loss_scaling": {}}).loss_scaling
    theirs = torch.amp.GradScaler("cpu").state_dict()
    assert ours is not None
    assert ours.model_dump() == {
        "initial": theirs["scale"],
        **{key: theirs[key] for key in ("growth_factor", "backoff_factor", "growth_interval")},
    }


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_describes_its_keys_and_refuses_others(section: type[BaseModel]) -> None:
    assert set(descriptions(section)) == set(section.model_fields)
    assert section.model_config["extra"] == "forbid"


def test_the_schedules_of_the_config_exist() -> None:
    names = {*schedule.POLICIES, "auto"}
    assert set(typing.get_args(Config.model_fields["schedule"].annotation)) == names


def test_a_config_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse_config(LAYERS).seed = 1


def test_a_config_survives_serialization() -> None:
    arguments = {"k": [1, 2.5, "x", None, math.inf, -math.inf]}
    data = {
        **BRANCHES,
        "max_grad_norm": 1,
        "metrics": {"accuracy": {"callable": "m:accuracy", "kwargs": arguments}},
        "data": {"train": "m:train"},
    }
    config = parse_config(data)
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("value", [datetime.date(2020, 1, 1), object(), {1: "one"}, b"bytes"])
@pytest.mark.parametrize("section", ["loss", "model"])
def test_arguments_that_json_cannot_hold_are_refused(section: str, value: object) -> None:
    name = "layers" if section == "model" else "callable"
    with pytest.raises(ConfigError, match=rf"{section}\.kwargs\.x.* must be a string"):
        parse_config({**LAYERS, section: {name: "m:f", "kwargs": {"x": value}}})


def test_a_tilde_is_the_home_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {
        "init": "~/weights",
        "log": {"folder": "~/runs"},
        "security": {"certs": "~/certs"},
        "checkpoint": {"dir": "~/steps"},
    }
    config = parse_config({**LAYERS, **paths}).with_folder(Path("/"))
    assert config.init == str(tmp_path / "weights")
    assert config.log_folder == tmp_path / "runs"
    assert config.certs_folder == tmp_path / "certs"
    assert config.checkpoint_folder == tmp_path / "steps"
    assert config.relative_checkpoint_folder == ""
    unknown = parse_config({**LAYERS, "init": "~nobody-here/weights"}).with_folder(Path("/"))
    assert unknown.init == "/~nobody-here/weights"


def test_a_copy_in_another_folder_leaves_the_original_where_it_is(tmp_path: Path) -> None:
    config = parse_config(LAYERS)
    assert config.folder == Path.cwd()
    assert config.with_folder(tmp_path).folder == tmp_path
    assert config.folder == Path.cwd()


def test_an_option_that_needs_data_says_why_and_names_the_key() -> None:
    data = {"train": "m:train", "batch_size": 8}
    assert parse_config({**LAYERS, "data": data}).require_data("training").batch_size == 8
    needed = r"no \[data\] section, which training needs: give it `train`"
    with pytest.raises(ConfigError, match=needed):
        parse_config(LAYERS).require_data("training")


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (LAYERS, ["stage0"]),
        (layers(num_stages=3), ["stage0", "stage1", "stage2"]),
        (layers(balance=[2, 1]), ["stage0", "stage1"]),
        (layers({"name": "first"}, {}, balance=[2, 1]), ["first", "stage1"]),
        (layers({}, {}, num_stages=2, balance=[1, 1]), ["stage0", "stage1"]),
        (layers({}, {}, balance="auto"), ["stage0", "stage1"]),
        (BRANCHES, ["image", "text", "head"]),
    ],
)
def test_stages_are_counted_and_named(data: dict[str, Any], names: list[str]) -> None:
    config = parse_config(data)
    assert config.num_stages == len(names)
    assert config.stage_names == names


@pytest.mark.parametrize(
    "data",
    [layers({}, {}), {"loss": "m:loss", "stages": [{"module": "m:A"}, {"module": "m:B"}]}],
    ids=["layers", "modules without inputs"],
)
def test_a_stage_without_inputs_reads_the_one_before(data: dict[str, Any]) -> None:
    assert parse_config(data).graph() == topology.chain_graph(["stage0", "stage1"])


def test_inputs_of_named_stages_form_the_graph() -> None:
    built = parse_config(BRANCHES).graph()
    assert built.sink == "head"
    assert [str(reference) for reference in built.inputs["head"]] == ["image", "text"]


def test_a_stage_may_have_another_precision_than_the_job() -> None:
    own = [{"autocast": "float32"}, {}, {"autocast": "float16"}]
    config = parse_config({**layers(*own), "autocast": "bfloat16", "loss_scaling": {}})
    assert [config.autocast_of(index) for index in range(3)] == [None, "bfloat16", "float16"]
    plain = config.without_mixed_precision()
    assert [plain.autocast_of(index) for index in range(3)] == [None, None, None]
    assert plain.loss_scaling is None


def test_addresses_go_by_stage() -> None:
    config = parse_config(layers({"addresses": ["127.0.0.1:1"]}, {"addresses": ["[::1]:2"]}))
    assert config.addresses == ["127.0.0.1:1", "[::1]:2"]


def test_a_stage_without_a_table_has_the_defaults() -> None:
    assert parse_config(layers(num_stages=2)).stage(1) == StageConfig()
    assert parse_config(layers({}, {"threads": 2})).stage(1).threads == 2


@pytest.mark.parametrize(
    ("overrides", "holds"),
    [
        ({}, False),
        ({"max_grad_norm": 1.0}, True),
        ({"loss_scaling": {}}, True),
        ({"scheduler": "torch.optim.lr_scheduler:StepLR"}, False),
        ({"scheduler": "torch.optim.lr_scheduler:StepLR", "scheduler_interval": "step"}, False),
        ({"scheduler": "torch.optim.lr_scheduler:ReduceLROnPlateau"}, False),
        (
            {
                "scheduler": "torch.optim.lr_scheduler:ReduceLROnPlateau",
                "scheduler_interval": "step",
            },
            True,
        ),
        ({"scheduler": "m:WatchesTheLoss", "scheduler_interval": "step"}, True),
        (
            {
                "stages": [{}, {"scheduler": "m:WatchesTheLoss"}],
                "scheduler": "torch.optim.lr_scheduler:StepLR",
                "scheduler_interval": "step",
            },
            True,
        ),
    ],
)
def test_steps_are_held_if_the_driver_needs_all_stages(
    overrides: dict[str, Any], holds: bool
) -> None:
    assert parse_config({**LAYERS, **overrides}).holds_steps is holds


def test_a_stage_has_an_optimizer_of_its_own_or_the_jobs_with_its_arguments() -> None:
    adam = {"callable": "torch.optim:Adam", "kwargs": {"lr": 0.1}}
    tables: list[dict[str, Any]] = [
        {"optimizer": adam, "scheduler": "m:Rate"},
        {"optimizer": {"lr": 0.2}, "scheduler": {"gamma": 0.5}},
        {"optimizer": "m:Own"},
        {},
    ]
    jobs = {"callable": "torch.optim.lr_scheduler:StepLR", "kwargs": {"step_size": 2}}
    config = parse_config({**layers(*tables), "scheduler": jobs})
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert [config.optimizer_of(index) for index in range(4)] == [
        OptimizerFactory.model_validate(adam),
        OptimizerFactory(callable="torch.optim:SGD", kwargs={"lr": 0.2}),
        OptimizerFactory(callable="m:Own"),
        OptimizerFactory(callable="torch.optim:SGD", kwargs={"lr": 0.01}),
    ]
    assert [config.scheduler_of(index) for index in range(4)] == [
        Factory(callable="m:Rate"),
        Factory(callable="torch.optim.lr_scheduler:StepLR", kwargs={"step_size": 2, "gamma": 0.5}),
        *[Factory.model_validate(jobs)] * 2,
    ]
    assert config.modules == {"m", "torch.optim", "torch.optim.lr_scheduler"}


def test_a_stage_may_have_a_scheduler_without_one_in_the_job() -> None:
    config = parse_config(layers({}, {"scheduler": "m:Rate"}))
    assert (config.scheduler_of(0), config.scheduler_of(1)) == (None, Factory(callable="m:Rate"))
    assert config.steps_scheduler("epoch")
    plain = config.without_schedulers()
    assert (plain.has_schedulers, config.has_schedulers) == (False, True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"loss": "m:loss"},
            r"needs \[model\] with a module, or \[\[stages\]\] with a module each",
        ),
        (
            layers(balance="auto"),
            r'"auto" needs the number of stages: give num_stages or \[\[',
        ),
        (layers(balance="even", num_stages=2), r"model.balance: .* 'auto' \(got 'even'\)"),
        (layers(balance=2), r"model.balance: must be a list of integers or .auto. \(got 2\)"),
        (
            layers({"memory": "8 gigs"}),
            "stages.0.memory: '8 gigs' is not a size; write",
        ),
        (layers({}, {}, balance=[1, 1, 1]), r"balance gives 3, \[\[stages\]\] gives 2"),
        (layers(num_stages=2, balance=[1, 1, 1]), "balance gives 3, num_stages gives 2"),
        (layers({}, num_stages=2), r"num_stages gives 2, \[\[stages\]\] gives 1"),
        (layers({"name": "a"}, {"name": "a"}), "stage name 'a' is used twice"),
        (layers({}, {"name": "stage0"}), "stage name 'stage0' is used twice"),
        (layers({"name": "input"}), "stage name 'input' is used twice or is reserved"),
        (layers({"name": "target"}), "stage name 'target' is used twice or is reserved"),
        (layers({"name": "driver"}), "stage name 'driver' is used twice or is reserved"),
        (layers({"name": "a.b"}), "stages.0.name: not of the form letters, digits"),
        (layers({"name": ""}), "stages.0.name: not of the form letters, digits"),
        (
            layers({"module": "m:A"}),
            "stage 'stage0': `module`, `kwargs`, `prefix` and `inputs` do not go",
        ),
        (layers({"inputs": ["input"]}), "do not go with"),
        (layers({"kwargs": {"a": 1}}), "do not go with"),
        (branches(0, module=None), "stage 'image' needs a `module`"),
        (branches(0, inputs=["head"]), "`inputs` form a cycle: 'image' reads 'head' reads 'image'"),
        (branches(2, inputs=["image"]), "no stage reads 'text', 'head'"),
        (branches(2, inputs=["image", "txet"]), "no stage 'txet'; did you mean 'text'"),
        (layers({"addresses": ["127.0.0.1:1"]}, {}), "1 of 2 stages have addresses"),
        (layers({"addresses": ["127.0.0.1"]}), "'127.0.0.1' is not HOST:PORT"),
        (layers({"addresses": ["a b:1"]}), "'a b:1' is not HOST:PORT"),
        (
            layers({"addresses": ["a:1", "b:1"], "replicas": 3}),
            "replicas gives 3, addresses gives 2",
        ),
        (layers({"replicas": 2, "shares": [1, 2, 3]}), "replicas gives 2, shares gives 3"),
        (layers({"shares": [1, 2]}), "unclear number of replicas: shares gives 2; give `replicas`"),
        (layers({"replicas": 0}), "replicas: must be 1 or more"),
        (
            {**layers({}), "balance_replicas": True},
            "balance_replicas = true, but no stage has",
        ),
        ({**BRANCHES, "rebalance": "auto"}, r"`rebalance` moves layers of a \[model\]"),
        (
            {**LAYERS, "rebalance": "suggest", "wire_dtype": "bfloat16"},
            "results would depend on where the cuts are",
        ),
        (
            {**layers({"replicas": 2}), "rebalance": "auto", "balance_replicas": True},
            "`rebalance` and `balance_replicas`",
        ),
        (
            {**LAYERS, "rebalance": "auto", "recovery": {"enabled": False}},
            "needs recovery.enabled = true",
        ),
        (
            {**layers({"frozen": True}, {"replicas": 2}), "rebalance": "auto"},
            "since they differ in frozen, replicas",
        ),
        (
            layers({"optimizer": {"callable": "m:O", "lr": 0.1}}),
            "stages.0.optimizer: `lr` beside `callable`: write a stage's own factory as",
        ),
        (
            layers({"optimizer": {"kwargs": {"lr": 0.1}}}),
            "stages.0.optimizer: `kwargs` without `callable`: write arguments .* as they are",
        ),
        (layers({"optimizer": {"callable": "m.O"}}), "stages.0.optimizer.callable: not of the"),
        (layers({"optimizer": "Adam"}), "stages.0.optimizer.callable: not of the form"),
        (layers({"optimizer": 3}), "stages.0.optimizer: must be a table"),
        (
            layers({"scheduler": {"step_size": 3}}),
            "stage 'stage0': `scheduler` gives arguments of the job's scheduler, but",
        ),
        (layers(balance=[2, 0]), "model.balance.1: must be 1 or more"),
        ({**LAYERS, "num_microbatches": 0}, "num_microbatches: must be 1 or more"),
        ({**LAYERS, "steps": 0}, "steps: must be 1 or more"),
        ({**LAYERS, "max_grad_norm": 0.0}, "max_grad_norm: must be more than 0"),
        ({**LAYERS, "schedule": "1F1B"}, "schedule: .* 'gpipe', '1f1b', 'zero-bubble' or 'auto'"),
        ({**LAYERS, "max_in_flight": 0}, "max_in_flight: must be 1 or more"),
        ({**LAYERS, "name": "my job"}, "name: not of the form letters"),
        ({**LAYERS, "loss": "torch.nn.MSELoss"}, "loss.callable: not of the form"),
        ({**LAYERS, "loss": "m:f()"}, "loss.callable: not of the form"),
        ({**LAYERS, "autocast": "float64"}, "autocast: .* 'bfloat16' or 'float16'"),
        (layers({"autocast": "half"}), "stages.0.autocast: .* 'bfloat16'"),
        (
            layers({}, {"autocast": "float16"}, {"autocast": "float16"}),
            r"\(stage 'stage1', 'stage2'\) loses small gradients .* a section \[loss_scaling\]",
        ),
        ({**LAYERS, "loss_scaling": {"init_scale": 2.0}}, "loss_scaling.init_scale: unknown key"),
        ({**LAYERS, "loss_scaling": {"initial": 0.5}}, "initial: must be 1 or more"),
        (
            {**LAYERS, "loss_scaling": {"initial": 1e39}},
            "initial: must be 8.5.* or less",
        ),
        ({**LAYERS, "loss_scaling": {"growth_factor": 1}}, "growth_factor: must be more than 1"),
        (
            {**LAYERS, "loss_scaling": {"backoff_factor": 1.0}},
            "factor: must be less than 1",
        ),
        ({**LAYERS, "loss_scaling": {"growth_interval": 0}}, "growth_interval: must be 1 or more"),
        ({**LAYERS, "model": {}}, "model: give `module`, an nn.Module that is cut, or `layers`"),
        (
            {**LAYERS, "model": {"module": "m:Net", "layers": "m:layers"}},
            "model: give `module`, an nn.Module that is cut, or `layers`: one of them",
        ),
        (
            {**LAYERS, "model": {"layers": "m:layers", "split": ["a"]}},
            "model: `split` goes with `module`, and this model has `layers`",
        ),
        (
            {**LAYERS, "model": {"layers": "m:layers", "inputs": []}},
            "model: `inputs` goes with `module`, and this model has `layers`",
        ),
        (
            {**MODULE, "tied": [["a", "b"]]},
            "`tied` follows from the model's `module`: leave it out",
        ),
        (
            {**MODULE, "stages": [{"autocast": "bfloat16"}]},
            "stage 'stage0': `autocast` does not go with the model's `module`",
        ),
        ({**MODULE, "cut": None}, "cut: unknown key"),
    ],
)
def test_options_that_exclude_each_other_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(data)


def evaluated(**more: Any) -> dict[str, Any]:
    """A config with an evaluation dataset and two metrics."""
    metrics = {"accuracy": "m:accuracy", "quality": "m:Quality"}
    return {**LAYERS, "data": {"train": "m:train", "test": "m:test"}, "metrics": metrics, **more}


def test_evaluations_follow_epochs_unless_steps_are_given() -> None:
    for given, epochs in (
        ({}, 1),
        ({"evaluate_every": 3}, 3),
        ({"evaluate_every": 0}, 0),
        ({"evaluate_every_steps": 7}, 0),
        ({"evaluate_every": 0, "evaluate_every_steps": 7}, 0),
    ):
        assert parse_config(evaluated(**given)).evaluate_every_epochs == epochs


def test_the_better_direction_follows_from_the_mode_or_the_name() -> None:
    for section, mode in (
        ({}, "min"),
        ({"metric": "accuracy"}, "max"),
        ({"metric": "quality", "mode": "min"}, "min"),
        ({"metric": "quality.f1"}, "max"),
        ({"metric": "accuracy", "mode": "min"}, "min"),
    ):
        found = parse_config(evaluated(early_stopping=section)).early_stopping
        assert found is not None
        assert found.direction == mode


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"early_stopping": {"metric": "acuracy", "mode": "max"}}, "did you mean 'accuracy'"),
        ({"early_stopping": {"metric": "quality"}}, "whether lower or higher 'quality' is"),
        ({"early_stopping": {"metric": "f1"}}, "'f1' is not one of loss, accuracy, quality"),
        ({"early_stopping": {}, "evaluate_every": 0}, "needs evaluations, and evaluate_every is 0"),
        ({"early_stopping": {"patience": 0}}, "early_stopping.patience: "),
        ({"early_stopping": {"min_delta": -1.0}}, "early_stopping.min_delta: "),
        ({"checkpoint": {"dir": "d", "best": "lss", "best_mode": "min"}}, "did you mean 'loss'"),
        ({"checkpoint": {"dir": "d", "best": "quality"}}, "give `best_mode` ="),
        ({"checkpoint": {"dir": "d", "best_mode": "max"}}, "`best_mode` needs `best`"),
        ({"evaluate_every": 1, "evaluate_every_steps": 5}, "not both"),
        ({"evaluate_every_steps": 5, "data": None}, "evaluate_every_steps needs an evaluation dat"),
        ({"early_stopping": {}, "data": {"train": "m:t"}}, r"\[early_stopping\] needs an eval"),
        ({"checkpoint": {"dir": "d", "best": "loss"}, "data": None}, "checkpoint.best needs an ev"),
    ],
)
def test_options_that_depend_on_evaluations_need_evaluations(
    more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(evaluated(**more))


def test_a_config_without_evaluation_is_valid() -> None:
    config = parse_config(
        evaluated(
            evaluate_every_steps=3,
            early_stopping={},
            checkpoint={"dir": "d", "best": "accuracy"},
            report="m:report",
        )
    )
    plain = config.without_evaluation()
    assert Config.model_validate_json(plain.model_dump_json()) == plain
    assert (plain.decisive_metrics, plain.metrics) == ({}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *({**dict.fromkeys(JobSettings.model_fields, 1.5), "max_grad_norm": "1.5"}).items(),
        *[("seed", "1"), ("seed", True), ("ship_code", 1)],
    ],
)
def test_a_value_of_the_wrong_type_is_refused_and_not_converted(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"\n  {key}: .*\(got {value!r}\)"):
        parse_config({**LAYERS, key: value})


def test_tuples_in_arguments_become_lists() -> None:
    factory = Factory(callable="torch.optim:Adam", kwargs={"betas": (0.9, (1, 2))})
    assert factory.kwargs == {"betas": [0.9, [1, 2]]}


@pytest.mark.parametrize(
    ("stage", "more", "message"),
    [
        ({"replicas": 3}, {"num_microbatches": 3}, None),
        (
            {"replicas": 3},
            {"num_microbatches": 1},
            "replicas 1, 2 will have nothing to do, since a step has only 1 micro-batch; raise "
            "num_microbatches",
        ),
        ({"replicas": 2}, {"microbatches_per_message": 3}, None),
        (
            {"replicas": 2},
            {"microbatches_per_message": 4},
            "replica 1 will have nothing to do, since a step has only 1 message of 4 micro-batches;"
            " lower microbatches_per_message or raise num_microbatches",
        ),
        ({"replicas": 3}, {"data": {"train": "m:data", "batch_size": 3}}, None),
        (
            {"replicas": 3},
            {"data": {"train": "m:data", "batch_size": 2}},
            "replica 2 will have nothing to do, since a step has only 2 micro-batches; raise "
            "data.batch_size",
        ),
        ({"shares": [3, 1], "replicas": 2}, {"num_microbatches": 3}, None),
        (
            {"shares": [9, 1], "replicas": 2},
            {"num_microbatches": 4},
            "replica 1 will have nothing to do, since a step has only 4 micro-batches; raise "
            "num_microbatches or make its shares more equal",
        ),
    ],
)
def test_replicas_without_bundles_are_a_warning(
    stage: dict[str, Any], more: dict[str, Any], message: str | None
) -> None:
    expected = [] if message is None else [f"stage 'stage0': {message}"]
    assert parse_config({**LAYERS, "stages": [stage], **more}).warnings == expected
