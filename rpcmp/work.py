"""What driver and stages say to each other for one micro-batch. Pickled by torch RPC."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch


class Mode(Enum):
    """What a round is for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


class Work(NamedTuple):
    """One micro-batch of one round, as every stage is asked for it.

    Attributes:
        round: counts train steps, evaluations and predictions together; unique in a generation.
        step: the optimizer step that this round is or follows; seeds dropout, names errors.
        microbatch: index in the round.
        num_microbatches: micro-batches in the round.
        accumulated: micro-batches whose gradients this step has already, from earlier rounds.
        num_samples: samples in this micro-batch.
        total_samples: samples in the round.
        mode: what the round is for.
    """

    round: int
    step: int
    microbatch: int
    num_microbatches: int
    accumulated: int
    num_samples: int
    total_samples: int
    mode: Mode

    @property
    def draw(self) -> int:
        """The micro-batch's number in the whole step, which its random numbers come from."""
        return self.accumulated + self.microbatch

    @property
    def weight(self) -> float:
        """This micro-batch's share of the round: what its mean loss counts."""
        return self.num_samples / self.total_samples


class Outputs(NamedTuple):
    """A stage's answer to one reader.

    Attributes:
        value: the output, or the part of it that was asked for: a tree of host tensors.
        presence: float32, one element for each tensor of `value`; ones. Only its gradient matters:
            1 where the reader has a gradient for the tensor and 0 where it has none. Distributed
            autograd sends zeros for a missing gradient, but None and zeros differ (weight decay
            and momentum act on the latter). None outside of training.
    """

    value: Any
    presence: torch.Tensor | None


class Evaluated(NamedTuple):
    """The sink's answer to an evaluation: loss and metrics, each a mean over the micro-batch."""

    loss: float
    metrics: dict[str, float]
