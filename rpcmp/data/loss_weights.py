"""What the mean losses of a mini-batch's micro-batches weigh, by the config's `loss_weight`.

    targets, cut into micro-batches ──loss_weight──> 30, 10, 0 ──> shares 0.75, 0.25, 0

The function is called where the targets are loaded, which is the only place that has those of all
micro-batches: in the driver, or in a process that loads samples for the sink. The shares reach the
sink with the targets. `rpcmp.losses` says why there are weights at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.pipelining import microbatches, pytree
from rpcmp.rpc.messages import LossWeight


class LossWeights:
    """Calls the config's `loss_weight`.

    Raises:
        FactoryError: it does not import, or takes other arguments.
    """

    def __init__(self, config: Config) -> None:
        source = config.weighing
        self._name = "" if source is None else f"loss_weight = {source.callable!r}"
        self._weigh: Callable[..., Any] | None = (
            None if source is None else importing.load_function(source, "loss_weight")
        )

    def of(self, targets: Sequence[Any], batch: str, trained: bool) -> list[float]:
        """Return what each micro-batch weighs, finite and not negative; none if samples count.

        Args:
            targets: those of each micro-batch.
            batch: names the mini-batch in an error, such as "step 7".
            trained: whether the mini-batch is trained on, so that it may not weigh nothing.

        Raises:
            FactoryError: the function raised, or returned something else.
            ConfigError: a mini-batch that is trained on weighs nothing.
        """
        if self._weigh is None:
            return []
        weights = [self._one(each, f"{batch}, micro-batch {i}") for i, each in enumerate(targets)]
        if trained and not any(weights):
            raise ConfigError(
                f"{batch}: the mini-batch weighs nothing, so there is nothing to learn from it: "
                f"{self._name} gives 0 for each of its {len(weights)} micro-batches: leave such "
                "samples out of data.train, or look at which targets it counts"
            )
        return weights

    def _one(self, targets: Any, where: str) -> float:
        assert self._weigh is not None
        try:
            weight = self._weigh(targets)
            number = float(weight)
        except Exception as error:
            raise FactoryError(
                f"{where}: {self._name} failed for targets {pytree.describe(targets)}: "
                f"{importing.explain_error(error)}"
            ) from error
        if not math.isfinite(number) or number < 0:
            raise FactoryError(
                f"{where}: {self._name} gives {number}: it has to give one number that is not "
                "negative, such as how many tokens count"
            )
        return number


def shares(weights: Sequence[float]) -> list[LossWeight]:
    """Return the weights of a mini-batch's micro-batches as the sink gets them."""
    total = microbatches.exact_sum(weights)
    return [LossWeight(weight, total) for weight in weights]
