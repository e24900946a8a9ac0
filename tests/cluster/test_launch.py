"""The library: launch, train, evaluate, predict, and recover from faults."""

from __future__ import annotations

import _thread
import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import rpcmp
from rpcmp.config.schema import Config
from rpcmp.driver.operations import Operations
from rpcmp.errors import ConfigError, NonFiniteLossError, StageError, WorkerDiedError
from tests.support.places import ZOO
from tests.support.pool import POOL, lend_servers
from tests.support.processes import FORKS, describe, forked, poll_for
from tests.zoo import zoo

pytestmark = pytest.mark.usefixtures("token")

BATCH = 10

METRICS = {"error": "zoo:error", "r2": "torchmetrics.regression:R2Score", "fit": "measures:Fit"}
"""A mean over samples, and two metrics with a state."""


def config(**more: object) -> Config:
    data = {
        "loss": "torch.nn:MSELoss",
        "num_microbatches": 4,
        "model": {"layers": "zoo:mlp", "balance": [2, 2]},
        "optimizer": {"callable": "torch.optim:Adam", "kwargs": {"lr": 0.01}},
        **more,
    }
    return Config.model_validate(data).with_folder(ZOO)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[rpcmp.Pipeline]:
    """Yield one pipeline for all tests of this module that leave it usable."""
    with rpcmp.launch(config(metrics=METRICS)) as launched:
        yield launched


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = zoo.regression(BATCH).tensors
    return inputs, targets


def test_training_lowers_the_loss(pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]) -> None:
    before = pipeline.evaluate(*batch).loss
    for _ in range(30):
        assert isinstance(pipeline.train_step(*batch), float)
    after = pipeline.evaluate(*batch)
    assert after.loss < before
    assert after.num_samples == BATCH


@pytest.mark.cluster
def test_stateful_metrics_are_computed_over_the_whole_batch(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    from torchmetrics.regression import R2Score  # a slow import

    inputs, targets = batch
    outputs = pipeline.predict(inputs)
    for _ in range(2):  # the second evaluation starts from an empty state
        found = pipeline.evaluate(inputs, targets).metrics
        assert list(found) == ["error", "r2", "fit.r2", "fit.samples"]
        assert found["r2"] == pytest.approx(float(R2Score()(outputs, targets)))
        assert found["error"] == pytest.approx(float(zoo.error(outputs, targets)))
        assert found["fit.samples"] == BATCH


def test_nothing_is_left_behind_after_a_step(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    pipeline.train_step(*batch)
    before = pipeline._call(Operations.live_state)
    for _ in range(3):
        pipeline.train_step(*batch)
        pipeline.evaluate(*batch)
        pipeline.predict(batch[0])

    def clean() -> bool:
        state = pipeline._call(Operations.live_state)
        counts = [
            count
            for process in state.values()
            for key, count in process.items()
            if key not in ("num_owner_rrefs", "num_forks")  # stage and optimizer
        ]
        return not any(counts) and state == before

    poll_for(clean, "contexts, memoized outputs and RRefs to be gone")


def test_predictions_equal_the_unsplit_model(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    unsplit = torch.nn.Sequential()
    for name, factory in zoo.mlp():
        unsplit.add_module(name, factory())
    unsplit.load_state_dict(pipeline.state_dict())
    unsplit.eval()
    with torch.no_grad():
        expected = unsplit(batch[0])
    torch.testing.assert_close(pipeline.predict(batch[0]), expected)
    assert pipeline.parameters_sha256() == rpcmp.parameters_sha256(unsplit.state_dict())


def test_state_dicts_restore_model_and_optimizer(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    model, optimizer = pipeline.state_dict(), pipeline.optimizer.state_dict()
    first = [pipeline.train_step(*batch) for _ in range(3)]
    pipeline.load_state_dict(model)
    pipeline.optimizer.load_state_dict(optimizer)
    assert [pipeline.train_step(*batch) for _ in range(3)] == first


def test_undone_steps_do_not_change_later_dropout_masks(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    model, optimizer = pipeline.state_dict(), pipeline.optimizer.state_dict()
    expected = [pipeline.train_step(*batch) for _ in range(2)]

    def clear() -> None:
        pipeline.forward_backward(*batch)
        pipeline.optimizer.zero_grad()

    def step() -> None:
        pipeline.forward_backward(*batch)
        pipeline.optimizer.step()
        pipeline.optimizer.load_state_dict(optimizer)

    def step_at_once() -> None:
        pipeline.train_step(*batch)
        pipeline.optimizer.load_state_dict(optimizer)

    for undone in (clear, step, step_at_once):
        pipeline.optimizer.load_state_dict(optimizer)
        undone()
        pipeline.load_state_dict(model)
        assert [pipeline.train_step(*batch) for _ in range(2)] == expected, undone.__name__


def test_an_invalid_optimizer_state_dict_changes_nothing(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    state = pipeline.optimizer.state_dict()
    with pytest.raises(ConfigError, match=r"it has no step, scheduler; load what pipeline\.opt"):
        pipeline.optimizer.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    assert pipeline.train_step(*batch) > 0


def test_gradients_can_be_accumulated_and_clipped(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    state = pipeline.state_dict()
    pipeline.forward_backward(*batch)
    pipeline.forward_backward(*batch)
    norm = pipeline.optimizer.clip_grad_norm_(0.25)
    assert norm > 0.25
    assert pipeline.optimizer.clip_grad_norm_(10.0) == pytest.approx(0.25, rel=1e-3)
    pipeline.optimizer.zero_grad()
    assert pipeline.optimizer.clip_grad_norm_(1.0) == 0.0
    trained = {k: v for k, v in pipeline.state_dict().items() if "running" not in k}
    assert all(torch.equal(v, state[k]) for k, v in trained.items() if v.is_floating_point())


def test_a_batch_may_have_any_number_of_samples(pipeline: rpcmp.Pipeline) -> None:
    for samples in (50, 13, 8):
        inputs, targets = zoo.regression(samples).tensors
        assert pipeline.predict(inputs).shape == (samples, 1)
        pipeline.train_step(inputs, targets)
    inputs, targets = zoo.regression(2).tensors
    assert pipeline.evaluate(inputs, targets).num_samples == 2


def test_an_error_in_the_model_leaves_the_pipeline_usable(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(StageError) as raised:
        pipeline.train_step(torch.ones(BATCH, 3), batch[1])
    assert (raised.value.stage, raised.value.phase) == ("stage0", "forward")
    assert "mat1 and mat2" in raised.value.traceback
    state = pipeline.state_dict()
    with pytest.raises(NonFiniteLossError):
        pipeline.train_step(batch[0] * float("inf"), batch[1])
    pipeline.load_state_dict(state)  # batch normalization has seen infinite values
    assert pipeline.optimizer.clip_grad_norm_(1.0) == 0.0  # neither call has left gradients


SETTINGS = pytest.mark.parametrize(
    ("schedule", "per_message"),
    [
        ("zero-bubble", 2),
        pytest.param("zero-bubble", 1, marks=pytest.mark.cluster),
        pytest.param("1f1b", 1, marks=pytest.mark.cluster),
        pytest.param("1f1b", 2, marks=pytest.mark.cluster),
    ],
)


def troubled(schedule: str, per_message: int, **kwargs: object) -> Config:
    """Return a job of two stages; one of them fails in the last micro-batch of step 2."""
    last = {"step": 2, "microbatches": 7, **kwargs}  # forward number 8, with 4 per step
    model = {"layers": "zoo:troubled", "balance": [2, 2], "kwargs": last}
    return config(model=model, schedule=schedule, microbatches_per_message=per_message)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {
        name.split(".")[0] for name, value in one.items() if not torch.equal(value, other[name])
    }


@SETTINGS
def test_a_stage_with_a_failed_backward_skips_the_step_and_stays_usable(
    schedule: str, per_message: int, batch: tuple[Tensor, Tensor]
) -> None:
    with rpcmp.launch(troubled(schedule, per_message, phase="backward", position=0)) as pipeline:
        pipeline.train_step(*batch)
        before = pipeline.state_dict()
        with pytest.raises(StageError, match="'stage0' failed in backward of micro-batch 3"):
            pipeline.train_step(*batch)
        failed = pipeline.state_dict()
        assert not differing(failed, before) & {"layer0", "layer1"}
        losses = [pipeline.train_step(*batch) for _ in range(2)]
        assert losses[1] < losses[0]
        assert differing(pipeline.state_dict(), failed) == {"layer0", "layer1", "layer2", "head"}


@SETTINGS
def test_no_stage_steps_on_a_loss_that_is_not_finite(
    schedule: str, per_message: int, batch: tuple[Tensor, Tensor]
) -> None:
    config = troubled(schedule, per_message, phase="forward", kind="nan", position=2)
    with rpcmp.launch(config) as pipeline:
        pipeline.train_step(*batch)
        before = pipeline.state_dict()
        with pytest.raises(NonFiniteLossError, match="in micro-batch 3 at step 2"):
            pipeline.train_step(*batch)
        assert not differing(pipeline.state_dict(), before)
        pipeline.train_step(*batch)
        assert pipeline.evaluate(*batch).num_samples == BATCH


def test_dropout_masks_differ_while_gradients_accumulate() -> None:
    """The model has no batch normalization: its statistics would differ anyway."""
    stages = [{"name": "encoder", "module": "zoo:Encoder", "inputs": ["input"]}]
    inputs = torch.ones(BATCH, zoo.FEATURES)
    targets = torch.zeros(BATCH, zoo.FEATURES)
    with rpcmp.launch(config(model=None, stages=stages)) as pipeline:
        first, second = (pipeline.forward_backward(inputs, targets) for _ in range(2))
        assert first != second
        pipeline.optimizer.zero_grad()


def test_a_state_dict_of_another_model_is_refused(pipeline: rpcmp.Pipeline) -> None:
    state = pipeline.state_dict()
    del state["head.bias"]
    with pytest.raises(rpcmp.RpcmpError, match=r"misses \['head.bias'\] and has unknown \['x'\]"):
        pipeline.load_state_dict({**state, "x": torch.ones(1)})


def test_an_earlier_error_does_not_hide_the_next_one(
    pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor]
) -> None:
    for inputs in (torch.ones(BATCH, 3), torch.ones(BATCH, 5)):
        with pytest.raises(StageError) as raised:
            pipeline.train_step(inputs, batch[1])
        assert f"x{inputs.shape[1]} and" in str(raised.value)


def test_an_invalid_batch_is_refused(pipeline: rpcmp.Pipeline) -> None:
    with pytest.raises(rpcmp.RpcmpError, match="made of tensors"):
        pipeline.train_step([1.0, 2.0], torch.ones(2))
    with pytest.raises(rpcmp.RpcmpError, match="no samples"):
        pipeline.train_step(torch.ones(0, 8), torch.ones(0, 1))
    with pytest.raises(rpcmp.RpcmpError, match="3 inputs and 4 targets"):
        pipeline.train_step(torch.ones(3, 8), torch.ones(4, 1))


def test_nested_inputs_and_outputs_keep_their_structure(batch: tuple[Tensor, Tensor]) -> None:
    stages = [
        {"name": "left", "module": "zoo:TwoHeads", "inputs": ["input.x"]},
        {"name": "last", "module": "zoo:TwoHeads", "inputs": ["left.left"]},
    ]
    with rpcmp.launch(config(model=None, stages=stages)) as pipeline:
        outputs = pipeline.predict({"x": batch[0], "ignored": torch.zeros(BATCH)})
        assert set(outputs) == {"left", "right", "nobody"}
        assert outputs["right"].shape == (BATCH, zoo.FEATURES)


def test_a_worker_that_dies_ends_the_pipeline_and_the_next_one_works(
    batch: tuple[Tensor, Tensor],
) -> None:
    kwargs = {"phase": "forward", "step": 2, "kind": "kill"}
    troubled = {"layers": "zoo:troubled", "balance": [2, 2], "kwargs": kwargs}
    with lend_servers(2) as servers:
        where = [server.address for server in servers]
        off = {"enabled": False}
        counting = config(model=troubled, recovery=off, loss_scope="micro-batch")
        with rpcmp.launch(counting, connect=where) as pipeline:
            pipeline.train_step(*batch)
            with pytest.raises(WorkerDiedError, match=r"worker of stage 'stage0'.*signal 9"):
                pipeline.train_step(*batch)
            with pytest.raises(WorkerDiedError):
                pipeline.train_step(*batch)
        with rpcmp.launch(config(), connect=where) as pipeline:
            pipeline.train_step(*batch)


def use(pipeline: rpcmp.Pipeline, batch: tuple[Tensor, Tensor], lose: Callable[[], None]) -> str:
    """Make all kinds of calls, with a call of `lose` before some; return the final model's hash."""
    pipeline.train_step(*batch)
    lose()
    pipeline.train_step(*batch)
    pipeline.forward_backward(*batch)
    lose()
    pipeline.forward_backward(*batch)
    pipeline.optimizer.clip_grad_norm_(0.5)
    pipeline.optimizer.step()
    state = pipeline.optimizer.state_dict()
    pipeline.optimizer.load_state_dict(state)
    pipeline.predict(batch[0])
    lose()
    pipeline.train_step(*batch)
    return pipeline.parameters_sha256()


def test_a_pipeline_recovers_from_every_lost_process(batch: tuple[Tensor, Tensor]) -> None:
    momentum = {"callable": "torch.optim:SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}
    victims = itertools.cycle(["rpcmp.worker", "rpcmp.driver", "serve"])
    others = {*FORKS.children(), *POOL.taken()}  # used by the module's pipeline

    def lose() -> None:
        if (which := next(victims)) == "serve":
            next(server for server in POOL.taken() if server not in others).end()
        else:
            next(process for process in forked(which) if process not in others).kill()

    with rpcmp.launch(config(optimizer=momentum)) as fault_free:
        expected = use(fault_free, batch, lambda: None)
    with rpcmp.launch(config(optimizer=momentum)) as pipeline:
        assert use(pipeline, batch, lose) == expected


def test_two_pipelines_run_side_by_side(batch: tuple[Tensor, Tensor]) -> None:
    whole = {"layers": "zoo:mlp", "balance": [4]}
    with rpcmp.launch(config()) as one, rpcmp.launch(config(model=whole)) as other:
        ahead = one.train_step(*batch)
        losses = [(other.train_step(*batch), one.train_step(*batch)) for _ in range(3)]
    # `one` is a step ahead of `other`; equal losses show that neither changes the other.
    assert [loss for loss, _ in losses] == [ahead, *(loss for _, loss in losses[:-1])]


def test_an_interrupt_while_launching_frees_the_servers(caplog: pytest.LogCaptureFixture) -> None:
    with lend_servers(2) as servers, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        where = [server.address for server in servers]

        def interrupt_when_claimed() -> None:
            poll_for(lambda: describe(servers[0]).job, "the server to have a job")
            _thread.interrupt_main()

        interrupter = threading.Thread(target=interrupt_when_claimed)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            rpcmp.launch(config(), connect=where)
        interrupter.join()
        with rpcmp.launch(config(), connect=where):
            pass
        gc.collect()
    assert not [warning for warning in caught if "never awaited" in str(warning.message)]
    assert "destroyed" not in caplog.text


def test_a_pipeline_garbage_collected_unclosed_warns_and_ends() -> None:
    dropped = rpcmp.launch(config(model={"layers": "zoo:mlp", "balance": [4]}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del dropped
        gc.collect()
    assert any("was not closed" in str(warning.message) for warning in caught)


def test_a_pipeline_that_cannot_start_leaves_no_process() -> None:
    with pytest.raises(rpcmp.RpcmpError, match="adds up to 2, but the model has 4 layers"):
        rpcmp.launch(config(model={"layers": "zoo:mlp", "balance": [1, 1]}))


def test_close_is_idempotent_and_later_calls_are_refused(
    batch: tuple[Tensor, Tensor],
) -> None:
    pipeline = rpcmp.launch(config(model={"layers": "zoo:mlp", "balance": [4]}))
    pipeline.close()
    pipeline.close()
    with pytest.raises(rpcmp.RpcmpError, match="closed"):
        pipeline.train_step(*batch)
