"""The sink's loss and metrics, micro-batch by micro-batch.

A micro-batch's loss is a mean over its samples, or over what the config's `loss_weight` counts. Its
share of the mini-batch is multiplied here and not later, so that gradients add up to those of the
whole mini-batch's mean. A loss that adds up over samples needs no share.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from rpcmp import metrics
from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.pipelining import pytree, random_streams
from rpcmp.rpc.messages import Evaluated, LossWeight, MicrobatchMeta
from rpcmp.worker.checks.objective import Objective
from rpcmp.worker.state.forward_state import ForwardState, ParameterWatch
from rpcmp.worker.state.places import Stateful

LOSS = "loss"
"""The name of a loss with parameters, among the layers of its stage."""


class SinkLoss:
    """The loss and the metrics of the last stage.

    Args:
        device: of the stage; targets are moved there.
        autocast: a context for the call of the loss.
        driver_metrics: metrics that the driver computes instead.
        view: returns what the loss and the metrics get of the outputs; all of them if omitted.

    Raises:
        ConfigError: the config weighs a loss that adds up over samples.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        autocast: AbstractContextManager[object],
        driver_metrics: Collection[str],
        view: Callable[[Any], Any] | None = None,
    ) -> None:
        self._device, self._view = device, view or _as_they_are
        self._autocast = autocast
        random_streams.seed_all(config.seed, "init", LOSS)
        self._loss = importing.load_function(config.loss, "loss")
        if isinstance(self._loss, nn.Module):
            self._loss.to(device)
            if not type(self._loss).__module__.startswith("torch."):
                _require_no_parameters(config.loss, type(self._loss).forward)
        else:
            _require_no_parameters(config.loss, self._loss)
        self._name = f"loss = {config.loss.callable!r}"
        self._sums_samples = _option(self._loss, "reduction") == "sum"
        is_meant = config.weighing is not None or config.loss_scope is not None
        self._may_miscount = not is_meant and _is_cross_entropy(self._loss)
        if self._sums_samples and config.weighing is not None:
            raise ConfigError(
                f"loss = {config.loss.callable!r} adds up over samples, and `loss_weight` weighs "
                "means: leave it out, or use a mean loss"
            )
        self._metrics = {
            name: _viewing(_metric(metric, f"metrics.{name}"), self._view)
            for name, metric in config.metrics.items()
            if name not in driver_metrics
        }
        self._proof: _FirstRounds | None = None
        if config.loss_scope is None:
            self._proof = _FirstRounds(
                config,
                self._loss,
                self._call,
                self._sums_samples,
                self._metrics,
                is_low=not isinstance(autocast, contextlib.nullcontext),
            )

    @property
    def module(self) -> nn.Module | None:
        """The loss, if it has parameters or buffers, which are the stage's as well."""
        if not isinstance(self._loss, nn.Module):
            return None
        return self._loss if any(True for _ in _tensors(self._loss)) else None

    @property
    def state(self) -> Stateful:
        """What the loss may change."""
        return stateful_parts(self._loss)

    def set_mode(self, training: bool) -> None:
        """Call `train` of a loss that is a module."""
        if isinstance(self._loss, nn.Module):
            self._loss.train(training)

    def prove(
        self, outputs: Any, targets: Any, meta: MicrobatchMeta, weight: LossWeight | None
    ) -> None:
        """Check in the first rounds that micro-batches have the loss of the mini-batch.

        Raises:
            ConfigError: they have another.
        """
        if self._proof is not None and (weight is None or weight.own):
            self._proof.see(outputs, targets, meta)

    def train(
        self, outputs: Any, targets: Any, meta: MicrobatchMeta, weight: LossWeight | None
    ) -> Tensor:
        """Return the micro-batch's part of the mini-batch's loss, a scalar."""
        if weight is not None and not weight.own:
            return _nothing(outputs)
        loss = self._scalar(outputs, self._to_device(targets), meta)
        if self._sums_samples:
            return loss
        return loss * (meta.weight if weight is None else weight.share)

    def evaluate(
        self, outputs: Any, targets: Any, meta: MicrobatchMeta, weight: LossWeight | None
    ) -> Evaluated:
        """Return the mean loss, and metrics, each a mean over the samples of the micro-batch."""
        targets = self._to_device(targets)
        own = None if weight is None else weight.own
        loss = 0.0 if own == 0 else float(self._scalar(outputs, targets, meta))
        if self._sums_samples:
            loss /= meta.num_samples
        means = {name: float(metric(outputs, targets)) for name, metric in self._metrics.items()}
        return Evaluated(loss, means, weight=own)

    def _scalar(self, outputs: Any, targets: Any, meta: MicrobatchMeta) -> Tensor:
        if self._may_miscount and meta.round.step <= 1:  # the first step, and what is before it
            self._warn(targets, meta)
        loss = self._call(outputs, targets)
        if loss.numel() != 1:
            raise ValueError(f"the loss is {pytree.describe(loss)}, not a scalar; reduce it")
        return loss.reshape(())

    def _call(self, outputs: Any, targets: Any) -> Tensor:
        with self._autocast:
            loss: Tensor = self._loss(self._view(outputs), targets)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"{self._name} returns {pytree.describe(loss)}, and not a tensor: return the loss "
                "alone, and make [metrics] of the rest"
            )
        return loss

    def _warn(self, targets: Any, meta: MicrobatchMeta) -> None:
        """Say if the loss is a mean of something else than the samples, which weigh it."""
        if reason := _uncounted(self._loss, targets):
            self._may_miscount = False
            if meta.round.num_microbatches > 1 or not meta.round.is_training:
                warnings.warn(
                    f"the loss is not a mean over samples, since {reason}, but micro-batches are "
                    "weighted by their samples: set `loss_weight` for the loss of the whole "
                    'mini-batch ("rpcmp.losses:tokens" counts the targets that are not ignored)',
                    stacklevel=1,
                )

    def _to_device(self, value: Any) -> Any:
        return pytree.map_tensors(lambda tensor: tensor.to(self._device), value)


EACH_OF = 8


def is_looked_at(number: int) -> bool:
    """Whether a round's micro-batches are compared: the first may have no padding, by chance.

    Each of the first, and then fewer and fewer: of twice as many rounds one more.
    """
    return number <= EACH_OF or number.bit_count() == 1


class _FirstRounds:
    """Looks at some training rounds and at the first evaluation; see `checks.objective`."""

    def __init__(
        self,
        config: Config,
        loss: Any,
        call: Callable[[Any, Any], Any],
        is_sum: bool,
        metrics: Mapping[str, Callable[..., Any]],
        is_low: bool,
    ) -> None:
        state = ForwardState(*stateful_parts(loss))
        self._its, self._may_miscount = loss, _is_cross_entropy(loss) and config.weighing is None
        named = loss.named_parameters() if isinstance(loss, nn.Module) else ()
        self._frozen = {f"{LOSS}.{n}": each for n, each in named if not each.requires_grad}
        self._watch: ParameterWatch | None = None
        weigh, self._is_known = None, True
        if config.weighing is not None:
            try:
                weigh = importing.load_function(config.weighing, "loss_weight")
            except FactoryError:  # only the host that loads the targets needs it
                self._is_known = False
        measured = f"loss = {config.loss.callable!r}", call, weigh, is_sum, state
        self._trained = Objective(*measured, is_trained=True, is_low=is_low)
        self._loss = Objective(*measured, is_low=is_low)
        self._metrics = [
            Objective(
                f"metrics.{name} = {config.metrics[name].callable!r}", each, None, False, state
            )
            for name, each in metrics.items()
        ]
        self._last, self._rounds = 0, {True: 0, False: 0}

    def see(self, outputs: Any, targets: Any, meta: MicrobatchMeta) -> None:
        """Check a micro-batch of a round that has several."""
        training = meta.round.is_training
        if meta.round.number != self._last:
            self._last = meta.round.number
            self._rounds[training] += 1
            if training and is_looked_at(self._rounds[training]):
                self._require_fixed()
            for each in (self._trained, self._loss, *self._metrics):
                each.forget()
        if meta.round.num_microbatches == 1 or not self._is_known:
            return
        if not (is_looked_at(self._rounds[training]) or self._has_new_gaps(targets)):
            return
        if training:
            self._trained.require_additive(outputs, targets, meta.num_samples)
            self._require_fixed()
            return
        self._loss.require_additive(outputs, targets, meta.num_samples)
        for metric in [*self._metrics]:
            try:
                metric.require_additive(outputs, targets, meta.num_samples)
            except ConfigError as error:  # it decides nothing of what is trained
                warnings.warn(str(error), stacklevel=1)
                self._metrics.remove(metric)  # said once, not with each micro-batch's numbers

    def _require_fixed(self) -> None:
        """Check that frozen parameters, which no snapshot has, are as they were.

        Raises:
            ConfigError: the loss has changed one.
        """
        if self._watch is None:
            self._watch = ParameterWatch(self._frozen)
        if changed := self._watch.changed():
            raise ConfigError(
                f"the loss changes its frozen parameter {changed!r}, which is taken for a constant "
                "and in no snapshot and checkpoint: make it a buffer (`register_buffer`)"
            )

    def _has_new_gaps(self, targets: Any) -> bool:
        """Whether a cross entropy leaves out targets that it may not have left out before.

        Only where a look at them costs nothing: the host would wait for another device.
        """
        tensors = pytree.tensors(targets)
        is_on_host = all(each.device.type == "cpu" for each in tensors)
        return self._may_miscount and is_on_host and bool(_uncounted(self._its, targets))


def _require_no_parameters(source: Factory, loss: Any) -> None:
    """Refuse a loss that reads parameters which are not its own, and which nobody would train."""
    if any(map(_has_parameters, importing.held_by(loss))):
        raise FactoryError(
            f"loss = {source.callable!r} has parameters that are none of its own as an nn.Module: "
            "they would never be trained, and are others than the model's; make it an nn.Module "
            "that has them, freeze them, or let the model return what the loss needs of it"
        )


def stateful_parts(loss: Any) -> Stateful:
    if isinstance(loss, nn.Module):
        return Stateful([(f"{LOSS}.", loss)])
    return Stateful([], [(LOSS, loss)])


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _has_parameters(value: Any) -> bool:
    """Whether a value is something that could be trained."""
    if isinstance(value, nn.Parameter):
        return value.requires_grad
    return isinstance(value, nn.Module) and any(each.requires_grad for each in value.parameters())


def _nothing(outputs: Any) -> Tensor:
    """Return the loss of a micro-batch without a weight: zero, with gradients of zero.

    The config's loss would give NaN, or raise, where nothing counts. No output is read either.
    """
    tensors = pytree.tensors(outputs)
    loss = torch.zeros((), device=tensors[0].device)
    for tensor in tensors:
        if tensor.requires_grad:
            loss = loss + tensor.flatten()[:0].sum().float()
    return loss


def _metric(source: Factory, what: str) -> Callable[..., Any]:
    """Import a function of (outputs, targets)."""
    metric = importing.load_function(source, what)
    if metrics.keeps_state(metric):
        raise FactoryError(
            f"{what} = {source.callable!r} has update and compute, so the driver has to compute "
            "it, and could not import it: install it there"
        )
    return metric


def _as_they_are(outputs: Any) -> Any:
    return outputs


def _viewing(metric: Callable[..., Any], view: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda outputs, targets: metric(view(outputs), targets)


def _uncounted(loss: Any, targets: Any) -> str:
    """Return why a cross entropy has another divisor than its samples; empty if it has not."""
    if _option(loss, "reduction") == "sum" or not isinstance(targets, Tensor):
        return ""
    if _option(loss, "weight") is not None:
        return "it weighs classes"
    ignored = _option(loss, "ignore_index")
    index = -100 if ignored is None else ignored
    if not targets.is_floating_point() and bool((targets == index).any()):
        return f"it leaves out targets that are {index}"
    return ""


def _is_cross_entropy(loss: Any) -> bool:
    """Whether a loss is one of torch's that divide by the targets and classes that count."""
    if isinstance(loss, functools.partial):
        return loss.func in (cross_entropy, nll_loss)
    return isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def _option(loss: Any, name: str) -> Any:
    """Return an option of a loss: an attribute of a module, or an argument of a function."""
    found = getattr(loss, name, None)
    return getattr(loss, "keywords", {}).get(name) if found is None else found
