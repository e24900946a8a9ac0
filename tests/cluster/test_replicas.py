"""Replicas of a stage: the bits of one process, whatever is lost; what is wrong with them."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rpcmp as library
from rpcmp.config import Config
from rpcmp.errors import StageError
from tests.support.faults import STEP, Faults, committed, drive
from tests.support.places import ZOO
from tests.support.processes import JobFolder, rpcmp, running
from tests.support.runs import checkpoints_in
from tests.zoo import zoo

MIXED = """
    num_microbatches = 5
    max_grad_norm = 0.5
    scheduler_interval = "step"
    optimizer = { callable = "torch.optim:AdamW", kwargs = { lr = 0.01 } }
    scheduler = { callable = "torch.optim.lr_scheduler:StepLR", kwargs = { step_size = 2 } }
    [model]
    layers = "zoo:mlp"
    balance = [1, 1, 2]
    [data]
    train = "zoo:regression"
    batch_size = 25
    [[stages]]
    replicas = 2
    shares = [3, 1]
    [[stages]]
    recompute = true
    replicas = 3
    [[stages]]
"""

PIPELINES = """
    schedule = "zero-bubble"
    num_microbatches = 6
    [model]
    layers = "zoo:mlp"
    balance = [2, 2]
    [data]
    train = "zoo:regression"
    batch_size = 25
    [[stages]]
    replicas = 2
    [[stages]]
    replicas = 2
"""

ALONE = """
    [model]
    layers = "zoo:mlp"
    [data]
    train = "zoo:regression"
    batch_size = 25
    [[stages]]
    replicas = 3
"""


def verified(config: Path, *overrides: str) -> str:
    """What `rpcmp verify` says of six steps."""
    options = [part for override in overrides for part in ("--set", override)]
    result = rpcmp("verify", config, "--steps", "6", *options)
    assert result.code == 0, result.err
    return result.out


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (MIXED, []),
        (PIPELINES, ["microbatches_per_message=2"]),
        pytest.param(ALONE, [], marks=pytest.mark.long),
        pytest.param(ALONE, ["num_microbatches=2"], id="idle", marks=pytest.mark.long),
        pytest.param(MIXED, ["schedule=gpipe"], marks=pytest.mark.long),
        pytest.param(MIXED, ["schedule=zero-bubble"], marks=pytest.mark.long),
        pytest.param(PIPELINES, ["num_microbatches=1"], marks=pytest.mark.long),
    ],
)
def test_replicas_give_the_bits_of_one_process(
    job: JobFolder, text: str, overrides: list[str]
) -> None:
    assert "identical: 6 losses" in verified(job.config(text), *overrides)


# Recovery


REPLICATED = "\n[[stages]]\n[[stages]]\nreplicas = 2\n[[stages]]\n"

MIDDLE = 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, str]], str]:
    """Losses and parameters of the job without a fault."""
    job = JobFolder(tmp_path_factory.mktemp("undisturbed") / "job")
    return committed(drive(replicated(Faults(job))))


def replicated(faults: Faults) -> Path:
    """The job with two replicas of the stage in the middle."""
    path = faults.config()
    path.write_text(path.read_text() + REPLICATED)
    return path


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("backward", "SIGKILL"),
        ("saving", "host"),
        *(
            pytest.param(phase, how, marks=pytest.mark.long)
            for phase in ("joining", "forward", "optimizer", "saving")
            for how in ("SIGKILL", "SIGSTOP", "exception", "cut")
        ),
    ],
)
def test_a_lost_replica_changes_nothing(
    job: JobFolder,
    undisturbed: tuple[list[tuple[int, str]], str],
    namespace: tuple[str, ...],
    phase: str,
    how: str,
) -> None:
    faults = Faults(job).fail_at(MIDDLE, 0 if phase == "joining" else STEP, phase, how)
    result = drive(
        replicated(faults), "--set", "recovery.heartbeat_timeout=2.0", under=namespace, timeout=90
    )
    assert committed(result) == undisturbed
    assert len([event for event in result.events if event["event"] == "recovered"]) == 1
    assert not [event for event in result.events if event["event"] == "resumed"]  # from no disk
    if how == "host":  # its twin had all that it had
        assert "'stage1:" in result.event("fault")["error"]


def test_a_run_of_replicas_is_resumed_with_the_bits_of_one_that_was_not_cut(
    job: JobFolder,
) -> None:
    config = job.config(
        PIPELINES.replace("[model]", 'checkpoint = { dir = "saved", every_steps = 2 }\n[model]')
    )
    options = ("--json", "--set", "steps=6")
    whole = rpcmp("drive", config, *options, "--set", "checkpoint.dir=whole")
    first = rpcmp("drive", config, "--json", "--set", "steps=4")
    assert first.code == 0, first.err
    manifest = checkpoints_in(job.folder / "saved").valid()[0]
    assert [part.name for part in manifest.stages] == ["stage0", "stage1"]
    resumed = rpcmp("drive", config, *options, "--resume")
    assert resumed.event("resumed")["step"] == 4
    ends = [run.event("summary")["parameters_sha256"] for run in (whole, resumed)]
    assert ends[0] == ends[1]


def test_a_run_is_resumed_with_another_number_of_replicas(job: JobFolder) -> None:
    """Another number is another sum, so it is the same run but for its last bits."""
    config = job.config(
        PIPELINES.replace("[model]", 'checkpoint = { dir = "saved", every_steps = 4 }\n[model]')
    )
    whole = rpcmp("drive", config, "--json", "--set", "steps=6", "--set", "checkpoint.dir=whole")
    assert rpcmp("drive", config, "--json", "--set", "steps=4").code == 0
    for number, (first, second) in enumerate([(3, 1), (1, 2)]):
        saved = shutil.copytree(job.folder / "saved", job.folder / f"saved{number}")
        options = ["steps=6", f"stages.0.replicas={first}", f"stages.1.replicas={second}"]
        settings = [part for each in options for part in ("--set", each)]
        where = ("--set", f"checkpoint.dir={saved}")
        resumed = rpcmp("drive", config, "--json", "--resume", *settings, *where)
        assert resumed.code == 0, resumed.err
        assert resumed.event("resumed")["step"] == 4
        assert resumed.losses == pytest.approx(whole.losses[4:], rel=1e-4)
        assert len(resumed.event("summary")["hosts"]) == first + second


# Shares by speed


def test_a_slow_replica_gets_less_and_a_resumed_run_leaves_it_at_that(job: JobFolder) -> None:
    config = job.config(
        """
        steps = 2
        num_microbatches = 8
        balance_replicas = true
        checkpoint = { dir = "saved" }
        [model]
        layers = "zoo:sleepy"
        [data]
        train = "zoo:regression"
        batch_size = 25
        [[stages]]
        replicas = 2
        """
    )
    with servers_of_replicas({}, {"SLEEPS": "0.3"}) as addresses:
        result = rpcmp("drive", config, "--json", "--connect", addresses)
        assert result.code == 0, result.err
        fast, slow = result.event("shares")["shares"]["stage0"]
        assert fast > slow
        kept: Any = checkpoints_in(job.folder / "saved").valid()[0].config["stages"]
        assert kept[0]["shares"] == [fast, slow]
    more = ("--json", "--resume", "--set", "steps=4")
    with servers_of_replicas({}, {}) as addresses:
        resumed = rpcmp("drive", config, *more, "--connect", addresses)
        verified = rpcmp("verify", config, "--steps", "4", "--connect", addresses)
    assert resumed.code == 0, resumed.err
    assert resumed.event("shares")["shares"] == {"stage0": [fast, slow]}
    assert resumed.event("summary")["parameters_sha256"] in verified.out, verified.err


@contextlib.contextmanager
def servers_of_replicas(*environments: dict[str, str]) -> Iterator[str]:
    """Servers of the replicas of stage 0, each with this in its environment; their addresses."""
    with contextlib.ExitStack() as stack:
        runs = []
        for replica, environment in enumerate(environments):
            command = ("serve", "--stage", "0", "--replica", str(replica))
            with pytest.MonkeyPatch.context() as patch:
                for key, value in environment.items():
                    patch.setenv(key, value)
                runs.append(stack.enter_context(running(*command, "--listen", "127.0.0.1:0")))
        yield ",".join(run.wait_for_line(r"SERVING on (\S+)")[1] for run in runs)


def on_path(*folders: Path) -> dict[str, str]:
    """The environment of a process that finds modules there first."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, before)])}


# What is wrong


def test_a_server_of_another_replica_is_refused(job: JobFolder) -> None:
    config = job.config(ALONE.replace("replicas = 3", "replicas = 2"))
    with servers_of_replicas({}, {}, {}) as addresses:
        first, _, third = addresses.split(",")
        result = rpcmp("drive", config, "--connect", f"{first},{third}")
    assert result.code == 2
    assert "serves stage 0 replica 2, not stage 0 replica 1; check `addresses`" in result.err


def test_replicas_of_other_shapes_are_refused_before_the_first_step(job: JobFolder) -> None:
    config = job.config(ALONE.replace("zoo:mlp", "zoo:wide").replace("= 3", "= 2"))
    with servers_of_replicas({}, {"WIDTH": "9"}) as addresses:
        result = rpcmp("drive", config, "--json", "--connect", addresses)
    assert result.code == 2
    assert (
        "replicas 0 and 1 of stage 'stage0' are not the same model: hidden.weight is" in result.err
    )
    assert "install the same on their hosts" in result.err
    assert not result.losses


FILES = {
    "my_model.py": "import blocks\nimport installed\n"
    "def layers():\n    return [('only', lambda: blocks.Block(8, 1))]\n",
    "blocks.py": "from torch import nn\nclass Block(nn.Linear):\n    pass\n",
    "losses.py": "def mse(outputs, targets):\n    return (outputs - targets).square().mean()\n",
    "site-packages/installed.py": "__version__ = '1.0'\n",
}


@pytest.mark.usefixtures("own_forks")
def test_replicas_with_another_loss_or_package_are_refused_before_the_first_step(
    job: JobFolder, tmp_path: Path
) -> None:
    """What the config names, and what is installed; all that counts is in test_examined_code."""
    for name, text in FILES.items():
        (job.folder / name).parent.mkdir(exist_ok=True)
        (job.folder / name).write_text(text)
    config = job.config(
        'loss = "losses:mse"\n' + ALONE.replace("zoo:mlp", "my_model:layers").replace("= 3", "= 2")
    )
    other = shutil.copytree(job.folder, tmp_path / "other")
    paths = [on_path(folder, folder / "site-packages") for folder in (job.folder, other)]
    changes = {
        "losses.py": ("# mean\n", "the code of 'losses' is"),
        "site-packages/installed.py": (
            "__version__ = '1.1'\n",
            "the version of 'installed' is 1.0 in replica 0 and 1.1 in replica 1",
        ),
    }
    options = ("--set", "ship_code=false", "--set", "steps=1")
    with (
        pytest.MonkeyPatch.context() as patch,
        servers_of_replicas(*paths) as addresses,
    ):
        patch.setenv("PYTHONPATH", paths[0]["PYTHONPATH"])  # of the driver
        for name, (more, said) in changes.items():
            (other / name).write_text(FILES[name] + more)
            result = rpcmp("drive", config, "--json", "--connect", addresses, *options)
            assert result.code == 2, result.out
            assert not result.losses
            assert f"replicas 0 and 1 of stage 'stage0' are not the same model: {said}" in (
                result.err
            )
            assert f"replica 1 on {platform.node()}: install the same on" in result.err
            (other / name).write_text(FILES[name])
        (other / "unused.py").write_text("# nobody imports it\n")
        same = rpcmp("drive", config, "--json", "--connect", addresses, *options)
    assert len(same.losses) == 1, same.err


def test_fewer_micro_batches_than_replicas_is_a_warning(job: JobFolder) -> None:
    result = rpcmp("drive", job.config(ALONE), "--json", "--set", "num_microbatches=2")
    assert result.code == 0, result.err
    assert result.event("warning")["text"] == (
        "stage 'stage0': replica 2 will have nothing to do, since a step has only 2 micro-batches; "
        "raise num_microbatches"
    )


@pytest.mark.long
def test_settings_are_measured_with_replicas_too(job: JobFolder) -> None:
    result = rpcmp("tune", job.config(PIPELINES), "--json")
    assert result.code == 0, result.err


# From a program


def test_gradients_that_add_up_over_calls_are_summed_once() -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(OrderedDict((name, build()) for name, build in zoo.wide()))
    batches = [(torch.randn(8, zoo.FEATURES), torch.randn(8, 1)) for _ in range(3)]
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)

    def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        nn.functional.mse_loss(expected(inputs), targets).backward()

    data = {
        "model": {"layers": "zoo:wide"},
        "stages": [{"replicas": 2}],
        "loss": "torch.nn:MSELoss",
        "optimizer": {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.1}},
        "num_microbatches": 4,
    }
    config = Config.model_validate(data).with_folder(ZOO)
    with library.launch(config) as pipeline:
        pipeline.load_state_dict(expected.state_dict())
        for inputs, targets in batches[:2]:
            pipeline.forward_backward(inputs, targets)
            backward(inputs, targets)
        norm = pipeline.optimizer.clip_grad_norm_(0.01)  # needs the sum
        assert norm == pytest.approx(nn.utils.clip_grad_norm_(expected.parameters(), 0.01).item())
        pipeline.forward_backward(*batches[2])  # and this adds to it
        backward(*batches[2])
        pipeline.optimizer.step()
        optimizer.step()
        for name, value in pipeline.state_dict().items():
            torch.testing.assert_close(value, expected.state_dict()[name])
        pipeline.parameters_sha256()  # fails where replicas differ
        pipeline.forward_backward(*batches[0])
        with pytest.raises(StageError):
            pipeline.predict(torch.randn(8, zoo.FEATURES + 1))
        pipeline.optimizer.step()  # nothing of it was lost


def test_a_sum_that_cannot_be_is_an_error_and_the_pipeline_goes_on() -> None:
    data = {
        "model": {"layers": "zoo:sparse"},
        "stages": [{"replicas": 2}],
        "loss": "zoo:token_loss",
        "num_microbatches": 2,
    }
    tokens = torch.randint(11, (4, 6))
    with library.launch(Config.model_validate(data).with_folder(ZOO)) as pipeline:
        for _ in range(2):
            with pytest.raises(StageError, match="sparse gradients cannot be summed"):
                pipeline.train_step(tokens, tokens)
            assert pipeline.evaluate(tokens, tokens).num_samples == 4
