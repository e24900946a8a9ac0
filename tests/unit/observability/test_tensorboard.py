"""The TensorBoard files of a run, read by TensorBoard. These tests start no processes."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from rpcmp.cli.observing import create_observers
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.process.channel import Message
from tests.support import runs
from tests.support.runevents import typed

LOSSES = [2.0, 1.0, 0.5]
LOG = {"folder": "", "tensorboard": "runs/x"}


def read_back(of: Config, events: Sequence[Message]) -> Any:
    """Write these events, and return what TensorBoard reads."""
    (board,) = create_observers(of)
    for event in events:
        board.handle(typed(event))
    board.close()
    assert of.tensorboard_folder is not None
    (folder,) = of.tensorboard_folder.iterdir()
    assert folder.name.startswith("job-2")
    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_has_the_curves_of_a_run(tmp_path: Path) -> None:
    of = runs.config(tmp_path, log=LOG)
    vitals = {"workers": {"lift": {"memory": 7.0}}, "step": 2, "time": runs.BEGIN + 2}
    groups = {"group_learning_rates": {"head": [0.1, 0.01]}}
    events = [e | groups if e["event"] == "step" else e for e in runs.events(of, LOSSES)[:-1]]
    found = read_back(of, [*events, {"event": "vitals", **vitals}])
    assert found.Scalars("learning_rate/head/group1")[0].value == pytest.approx(0.01)
    loss = found.Scalars("loss")
    assert [(point.step, point.value) for point in loss] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert [point.wall_time for point in loss] == [runs.BEGIN + step for step in (1, 2, 3)]
    assert found.Scalars("eval/accuracy")[0].step == 3
    assert found.Scalars("memory/lift")[0].value == 7.0
    assert set(found.Tags()["scalars"]) == {
        "loss",
        "samples_per_s",
        "step_s",
        "data_share",
        "busy/lift",
        "busy/head",
        "learning_rate/lift",
        "learning_rate/head",
        "learning_rate/head/group1",
        "eval/loss",
        "eval/accuracy",
        "memory/lift",
        *(f"lost/{label}/{why}" for label in runs.STAGES for why in runs.LOST),
    }


def test_tensorboard_has_the_config_as_text_and_as_hyperparameters(tmp_path: Path) -> None:
    of = runs.config(tmp_path, log=LOG, metrics={"accuracy": "m:accuracy"})
    found = read_back(of, runs.events(of, LOSSES))
    (text,) = found.Tensors("config")
    assert '"lr": 0.1' in text.tensor_proto.string_val[0].decode()
    assert "a secret" not in text.tensor_proto.string_val[0].decode()
    content = found.summary_metadata
    experiment = metadata.parse_experiment_plugin_data(
        content[metadata.EXPERIMENT_TAG].plugin_data.content
    )
    shown = [info.name.tag for info in experiment.metric_infos]
    assert shown == ["loss", "eval/loss", "eval/accuracy"]
    assert set(shown) <= set(found.Tags()["scalars"])
    start = metadata.parse_session_start_info_plugin_data(
        content[metadata.SESSION_START_INFO_TAG].plugin_data.content
    )
    assert start.hparams["optimizer.kwargs.lr"].number_value == 0.1
    assert start.hparams["model.balance"].string_value == "[2, 2]"
    assert not any(name.startswith("log.") for name in start.hparams)
    assert metadata.SESSION_END_INFO_TAG in content


def test_tensorboard_has_the_graph_of_stages(tmp_path: Path) -> None:
    of = runs.config(tmp_path, log=LOG)
    found = read_back(of, runs.events(of, LOSSES))
    nodes = {node.name: node for node in found.Graph().node}
    assert {name: list(node.input) for name, node in nodes.items()} == {
        "input": [],
        "target": [],
        "lift": ["input"],
        "head": ["lift", "target"],
    }
    assert nodes["head"].attr["reads"].s == b"lift, lift.skip, target"
    assert nodes["head"].attr["replicas"].i == 1


def test_tensorboard_reads_a_file_up_to_where_it_was_cut_off(tmp_path: Path) -> None:
    of = runs.config(tmp_path, log=LOG)
    (board,) = create_observers(of)
    for event in runs.events(of, LOSSES)[:-1]:
        board.handle(typed(event))  # as if the run were killed: nothing is closed
    (file,) = (tmp_path / "runs" / "x").glob("*/*")
    found = EventAccumulator(str(file.parent)).Reload()
    assert len(found.Scalars("loss")) == 3
    board.close()


def test_run_that_never_started_leaves_no_folder(tmp_path: Path) -> None:
    of = runs.config(tmp_path, log=LOG)
    (board,) = create_observers(of)
    board.handle(typed(runs.run(of)))
    board.handle(typed({"event": "end", "outcome": "failed", "error": "nobody answers"}))
    board.close()
    assert list((tmp_path / "runs" / "x").iterdir()) == []


def test_tensorboard_refuses_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"log\.tensorboard: cannot write .*runs/x"):
        create_observers(runs.config(tmp_path, log=LOG))


def test_error_explains_how_to_install_tensorboard_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name == "rpcmp.observability.tensorboard":
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install 'rpcmp\[tensorboard\]'"):
        create_observers(runs.config(tmp_path, log=LOG))
    assert list(tmp_path.iterdir()) == []
