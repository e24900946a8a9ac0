"""A run trains what plain PyTorch would over whole mini-batches, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from rpcmp.config import importing, loader
from rpcmp.config.schema import Config
from rpcmp.driver import module_proof
from rpcmp.errors import ConfigError, JobError, StageConfigError
from tests.support import plain
from tests.support.cuts import cut_here
from tests.support.localgroup import local_group
from tests.support.processes import JobFolder
from tests.zoo import surprises

JOB = """
steps = 3
num_microbatches = 4
loss = "torch.nn:MSELoss"
optimizer = { callable = "torch.optim:SGD", kwargs = { lr = 0.05 } }
[model]
num_stages = 2
[data]
train = "tests.zoo.surprises:pairs"
batch_size = 8
shuffle = false
"""

MODULE = 'model.module="tests.zoo.surprises:Net"'


def configured(job: JobFolder, *overrides: str) -> Config:
    config = loader.load_config(job.config(JOB), overrides)
    return cut_here(config)


def truth(config: Config, net: nn.Module, evaluated: Sequence[Any] = ()) -> list[float]:
    assert config.data is not None
    data = importing.create(config.data.train, "data.train")
    loss = importing.load_function(config.loss, "loss")
    return plain.train(net, loss, plain.mini_batches(data), evaluated=evaluated)


def require_plain(config: Config, net: nn.Module) -> None:
    """Check a run's losses and what it has trained against a plain loop's."""
    expected = truth(config, net)
    with local_group(config) as local:
        trained = local.train()
    assert plain.close(trained.losses, expected)
    assert plain.furthest(trained.state, net) < 1e-9


def whole(layers: list[tuple[str, Callable[[], nn.Module]]]) -> nn.Module:
    net = nn.Sequential()
    for name, make in layers:
        net.add_module(name, make())
    return net


@pytest.mark.parametrize("kind", ["", "swish", "cache", "hook of a parameter"])
def test_a_module_is_trained_as_it_is(job: JobFolder, kind: str) -> None:
    config = configured(job, MODULE, f'model.kwargs={{ kind = "{kind}" }}')
    require_plain(config, surprises.Net(kind))


@pytest.mark.parametrize(
    ("returns", "by"),
    [
        ("dict", "by_form"),
        ("list", "by_form"),
        ("record", "by_attributes"),
        ("named tuple", "by_attributes"),
        ("model output", "by_positions"),
    ],
)
def test_a_loss_reads_numbers_texts_lists_and_names_of_what_a_module_returns(
    job: JobFolder, returns: str, by: str
) -> None:
    loss = f'loss="tests.zoo.surprises:{by}"'
    config = configured(job, MODULE, f'model.kwargs={{ returns = "{returns}" }}', loss)
    require_plain(config, surprises.Net(returns=returns))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "scaled",
            r"gradient of 'blocks.0.inner.bias' is .* lost in a cut: Scaled \(surp",
        ),
        ("clipped", r"lost in a cut: Clipped \(surprises.py:"),
        ("pulling", r"lost in a cut: Pulling \(surprises.py:"),
        ("hook of a module", r"hooks of gradients, which its layers lose: blocks.1 \(Block\)"),
        ("hook of a tensor", r"puts hooks on tensors, which its layers lose: surprises.py:"),
        ("hook after sums", r"in two micro-batches than for all of them together: the gradient of"),
        ("mixing", r"in two micro-batches than for all of them together: "),
        ("random", "draws from Python's random"),
        ("numpy", "draws from numpy.random"),
        ("generator", "draws from blocks.1.noise"),
        ("counter", r"changes blocks.1.calls in each forward"),
        ("late counter", r"changes blocks.1.calls in each forward"),
        ("global counter", r"changes tests.zoo.surprises.CALLS in each forward"),
        ("reentrant", r"use_reentrant=True: set use_reentrant=False"),
    ],
)
def test_what_a_cut_would_lose_is_refused_by_name(job: JobFolder, kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        configured(job, MODULE, f'model.kwargs={{ kind = "{kind}" }}')


@pytest.mark.parametrize("kind", ["hook after sums", "mixing"])
def test_one_micro_batch_or_a_word_of_the_user_lets_pass_what_depends_on_them(
    job: JobFolder, kind: str
) -> None:
    kwargs = f'model.kwargs={{ kind = "{kind}" }}'
    configured(job, MODULE, kwargs, 'loss_scope="micro-batch"')
    require_plain(configured(job, MODULE, kwargs, "num_microbatches=1"), surprises.Net(kind))


@pytest.mark.parametrize("recompute", ["", "stages=[{ recompute = true }, {}]"])
@pytest.mark.parametrize("kind", surprises.CARRIED)
def test_what_forwards_carry_on_survives_evaluations_and_is_not_carried_twice(
    job: JobFolder, kind: str, recompute: str
) -> None:
    layers = ['model.layers="tests.zoo.surprises:carrying"', f'model.kwargs={{ kind = "{kind}" }}']
    config = configured(job, *layers, "num_microbatches=1", *filter(None, [recompute]))
    expected = truth(config, whole(surprises.carrying(kind)))
    more = ["evaluate_every_steps=1", 'data.test="tests.zoo.surprises:pairs"']
    evaluated = configured(job, *layers, "num_microbatches=1", *more, *filter(None, [recompute]))
    with local_group(evaluated) as local:
        trained = local.train(evaluate=True)
        assert len(local.of("eval")) == plain.STEPS
    assert plain.close(trained.losses, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", ["", "stages=[{ recompute = true }, {}]"])
@pytest.mark.parametrize("kind", ["mean", "sum", "scaled"])
def test_gradients_that_a_function_adds_are_those_of_a_mini_batch_or_refused(
    job: JobFolder, kind: str, recompute: str, schedule: str
) -> None:
    layers = ['model.layers="tests.zoo.surprises:injecting"', f'model.kwargs={{ kind = "{kind}" }}']
    more = [f'schedule="{schedule}"', *filter(None, [recompute])]
    config = configured(job, *layers, *more)
    if kind != "mean":
        require_plain(config, whole(surprises.injecting(kind)))
        return
    refused = r"Injecting \(surprises.py:\d+\) adds a gradient of its own in each micro-batch"
    with local_group(config) as local, pytest.raises(JobError, match=refused):
        local.train()
    require_plain(
        configured(job, *layers, *more, "num_microbatches=1"), whole(surprises.injecting(kind))
    )


def test_a_loss_is_trained_with_the_model(job: JobFolder) -> None:
    config = configured(
        job,
        'model.layers="tests.zoo.surprises:embeddings"',
        'loss="tests.zoo.surprises:Prototypes"',
        'data.train="tests.zoo.surprises:classes"',
    )
    net, loss = whole(surprises.embeddings()), surprises.Prototypes()
    expected = plain.train(net, loss, plain.mini_batches(surprises.classes()))
    with local_group(config) as local:
        trained = local.train()
    assert plain.close(trained.losses, expected)
    assert plain.furthest(trained.state, net) < 1e-9
    assert float((trained.state["loss.weight"] - loss.weight).abs().max()) < 1e-9


@pytest.mark.parametrize("loss", ["surprises:Holder", "counting:regularized"])
def test_a_loss_that_hides_its_parameters_is_refused(job: JobFolder, loss: str) -> None:
    config = configured(
        job,
        'model.layers="tests.zoo.surprises:embeddings"',
        f'loss="tests.zoo.{loss}"',
        'data.train="tests.zoo.surprises:classes"',
    )
    reason = "has parameters that are none of its own"
    with pytest.raises(JobError, match=reason), local_group(config):
        pass


@pytest.mark.parametrize("loss", ["contrast", "ratio", "normed"])
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.filterwarnings("error:.*cannot be called with parts")
def test_an_objective_that_depends_on_the_micro_batches_is_refused(
    job: JobFolder, loss: str, count: int
) -> None:
    layers = 'model.layers="tests.zoo.surprises:towers"'
    own = f'loss="tests.zoo.surprises:{loss}"'
    config = configured(job, layers, own, f"num_microbatches={count}")
    if count == 1:
        require_plain(config, whole(surprises.towers()))
        return
    again = configured(
        job, layers, own, f"num_microbatches={count}", "stages=[{}, {recompute=true}]"
    )
    for each in (config, again):
        with local_group(each) as local:
            with pytest.raises(JobError, match=f"surprises:{loss}' depends on how a mini-batch is"):
                local.train()
            assert not local.of("step")
    meant = configured(job, layers, own, f"num_microbatches={count}", 'loss_scope="micro-batch"')
    with local_group(meant) as local:
        assert len(local.train().losses) == plain.STEPS


def test_a_loss_without_a_gradient_is_an_error(job: JobFolder) -> None:
    config = configured(job, 'model.layers="tests.zoo.surprises:detached"', "model.num_stages=3")
    with local_group(config) as local, pytest.raises(JobError, match="does not depend on anything"):
        local.train()


def test_recompute_refuses_a_forward_that_changes_parameters(job: JobFolder) -> None:
    layers = 'model.layers="tests.zoo.surprises:averaged"'
    config = configured(job, layers, "num_microbatches=1", "stages=[{ recompute = true }, {}]")
    with local_group(config) as local, pytest.raises(JobError, match=r"parameter 'first\.teacher"):
        local.train()
    require_plain(configured(job, layers, "num_microbatches=1"), whole(surprises.averaged()))


TIME_FIRST = [
    'model.layers="tests.zoo.surprises:time_first"',
    'data.train="tests.zoo.surprises:Sequences"',
    'loss="tests.zoo.surprises:token_error"',
]


@pytest.mark.parametrize("data", ["Sequences", "Streamed"])
def test_a_collate_function_that_puts_time_first_is_refused(job: JobFolder, data: str) -> None:
    """Also where there are as many samples as the sequence is long."""
    own = [f'data.train="tests.zoo.surprises:{data}"', 'data.collate="tests.zoo.surprises:stacked"']
    config = configured(job, *TIME_FIRST, *own, 'loss="tests.zoo.surprises:token_error"')
    reason = "first dimension does not count the samples"
    with pytest.raises((ConfigError, JobError), match=reason), local_group(config) as local:
        local.train()


def test_layers_that_read_the_first_dimension_as_time_are_refused(job: JobFolder) -> None:
    config = configured(job, *TIME_FIRST)
    with local_group(config) as local, pytest.raises(ConfigError, match="carries on what it comp"):
        local.train()
    require_plain(configured(job, *TIME_FIRST, "num_microbatches=1"), whole(surprises.time_first()))


def test_what_forwards_carry_from_micro_batch_to_micro_batch_is_refused(job: JobFolder) -> None:
    layers = ['model.layers="tests.zoo.surprises:carrying"', 'model.kwargs={ kind = "attribute" }']
    reason = "micro-batches are no mini-batch"
    with local_group(configured(job, *layers)) as local, pytest.raises(ConfigError, match=reason):
        local.train()


ONCE = {
    "mean": "in training, output 0 of some samples computed together",
    "center": "the forward changes first.center each time",
    "anneal": "the forward changes first.calls each time",
    "norm": "the forward changes first.layer.parametrizations.weight.0._u",
    "clip": "the hook of the parameter 'first.layer.weight' gives something else",
    "rescale": "changes gradients: the gradients of samples in two micro-batches do not add up",
}
"""Why several micro-batches are refused, by what happens once per mini-batch."""


@pytest.mark.parametrize("kind", ONCE)
def test_what_happens_once_per_mini_batch_needs_one_micro_batch(job: JobFolder, kind: str) -> None:
    layers = [
        'model.layers="tests.zoo.surprises:once_a_step"',
        f'model.kwargs={{ kind = "{kind}" }}',
    ]
    with (
        local_group(configured(job, *layers)) as local,
        pytest.raises(StageConfigError, match=re.escape(ONCE[kind])),
    ):
        local.train()
    one = configured(job, *layers, "num_microbatches=1")
    require_plain(one, whole(surprises.once_a_step(kind)))


@pytest.mark.parametrize(
    ("kind", "reason"), [("center", "changes first.center each time"), ("mean", "in training, ")]
)
def test_a_module_that_is_cut_is_asked_where_it_is_cut(
    job: JobFolder, kind: str, reason: str
) -> None:
    own = [
        'model.module="tests.zoo.surprises:Unsplit"',
        f'model.kwargs={{ kind = "{kind}" }}',
        'model.split=["first", "second"]',
    ]
    with pytest.raises(ConfigError, match=reason):
        configured(job, *own)


def test_a_module_too_large_for_a_proof_is_asked_in_step_1(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_proof, "is_quick", lambda module, inputs: False)
    own = [
        'model.module="tests.zoo.surprises:Unsplit"',
        'model.kwargs={ kind = "mean" }',
        'model.split=["first", "second"]',
    ]
    reason = "at step 1: in training, output 0 of some samples"
    with local_group(configured(job, *own)) as local, pytest.raises(JobError, match=reason):
        local.train()


def test_an_optimizer_of_all_parameters_needs_one_stage(job: JobFolder) -> None:
    own = [
        'model.layers="tests.zoo.surprises:once_a_step"',
        'model.kwargs={ kind = "" }',
        'optimizer={ callable = "tests.zoo.surprises:GlobalNorm", kwargs = { lr = 0.05 } }',
    ]
    reason = "computes with all parameters at once"
    with pytest.raises((ConfigError, JobError), match=reason), local_group(configured(job, *own)):
        pass


def test_a_loss_that_changes_its_buffers_is_refused_for_several_micro_batches(
    job: JobFolder,
) -> None:
    own = [
        'model.layers="tests.zoo.surprises:embeddings"',
        'loss="tests.zoo.surprises:Centers"',
        'data.train="tests.zoo.surprises:classes"',
    ]
    reason = r"changes loss\.centers in each call, so once per micro"
    with local_group(configured(job, *own)) as local, pytest.raises(JobError, match=reason):
        local.train()
    config = configured(job, *own, "num_microbatches=1")
    net, loss = whole(surprises.embeddings()), surprises.Centers()
    expected = plain.train(net, loss, plain.mini_batches(surprises.classes()))
    with local_group(config) as local:
        trained = local.train()
    assert plain.close(trained.losses, expected)
    assert torch.equal(trained.state["loss.centers"], loss.centers)


GROWING = '{ callable = "torch.optim.lr_scheduler:ReduceLROnPlateau", kwargs = { mode = "max" } }'
WRAPPING = '{ callable = "tests.zoo.surprises:Wrapping" }'


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [(GROWING, "waits for something that grows"), (WRAPPING, "has a ReduceLROnPlateau inside")],
)
def test_a_scheduler_that_would_watch_something_else_is_refused(
    job: JobFolder, scheduler: str, reason: str
) -> None:
    config = configured(job, MODULE, f"scheduler={scheduler}")
    with pytest.raises(JobError, match=reason), local_group(config):
        pass


def test_parameters_that_get_no_gradient_are_named(
    job: JobFolder, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(job, 'model.layers="tests.zoo.surprises:half_detached"')
    require_plain(config, whole(surprises.half_detached()))
    assert "no gradient has come to first.weight, first.bias in the first step" in caplog.text


@pytest.mark.parametrize("kind", ["running scale", "rounds later", "temporary"])
def test_what_a_forward_writes_is_written_as_often_as_in_plain_pytorch(
    job: JobFolder, kind: str
) -> None:
    own = ['model.layers="tests.zoo.surprises:writing"', f'model.kwargs={{ kind = "{kind}" }}']
    require_plain(configured(job, *own, "num_microbatches=1"), whole(surprises.writing(kind)))


def test_a_dtype_that_no_snapshot_holds_is_refused_before_the_first_step(job: JobFolder) -> None:
    layers = 'model.layers="tests.zoo.surprises:doubly_complex"'
    refused = r"'first\.weight' is torch\.complex128, .* set recovery\.enabled = false"
    with pytest.raises(JobError, match=refused), local_group(configured(job, layers)):
        pass
    without = configured(job, layers, "recovery.enabled=false")
    require_plain(without, whole(surprises.doubly_complex()))


def test_a_forward_may_freeze_parameters_and_thaw_none(job: JobFolder) -> None:
    own = ['model.layers="tests.zoo.surprises:freezing"', "num_microbatches=1"]
    freezes, thaws = (f'model.kwargs={{ kind = "{kind}" }}' for kind in ("freezes", "thaws"))
    require_plain(configured(job, *own, freezes), whole(surprises.freezing("freezes")))
    refused = "first.inner.weight, first.inner.bias: frozen when the stage was built, and trained"
    with local_group(configured(job, *own, thaws)) as local, pytest.raises(JobError, match=refused):
        local.train()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("compiled", "returns a OptimizedModule, which .* set compile = true"),
        ("compiled block", "returns a OptimizedModule in 'blocks.1'"),
        ("parallel", "returns a DataParallel, which .* `replicas`"),
        ("averaged", "returns a AveragedModel"),
        ("scripted", "returns TorchScript, which cannot be cut"),
    ],
)
def test_wrappers_are_refused_by_name(job: JobFolder, kind: str, reason: str) -> None:
    kwargs = f'model.kwargs={{ kind = "{kind}" }}'
    with pytest.raises(ConfigError, match=reason):
        configured(job, 'model.module="tests.zoo.surprises:wrapped"', kwargs)
    if kind != "scripted":
        config = configured(job, 'model.layers="tests.zoo.surprises:wrapped_layers"', kwargs)
        with pytest.raises(JobError, match=f"layer 'first' {reason}"), local_group(config):
            pass


GRAPH = """
steps = 3
num_microbatches = 4
loss = "torch.nn:MSELoss"
optimizer = {{ callable = "torch.optim:SGD", kwargs = {{ lr = 0.05 }} }}
[[stages]]
name = "hidden"
module = "tests.zoo.surprises:hidden"
[[stages]]
name = "direct"
module = "tests.zoo.surprises:Direct"
kwargs = {{ asks = {asks} }}
inputs = ["hidden", "input"]
[data]
train = "tests.zoo.surprises:pairs"
batch_size = 8
shuffle = false
"""


def test_a_gradient_of_a_part_of_the_model_is_refused(job: JobFolder) -> None:
    config = loader.load_config(job.config(GRAPH.format(asks="true")))
    reason = "another input was computed at another stage"
    with local_group(config) as local, pytest.raises(JobError, match=reason):
        local.train()
    with local_group(loader.load_config(job.config(GRAPH.format(asks="false")))) as local:
        assert len(local.train().losses) == plain.STEPS
