"""What driver and stages say to each other for a bundle of micro-batches. Pickled by torch RPC.

A bundle is what travels in one message: one micro-batch, or `microbatches_per_message` of them. A
message costs about two milliseconds of CPU on its way, whatever is in it, so that stages which
compute for less are better off with fewer of them. Schedules, rounds and distributed autograd see
bundles alone; what is computed, drawn and summed is still one micro-batch after the other, which
is why bits do not depend on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch

from rpcmp.config.topology import num_bundles
from rpcmp.pipelining import microbatch


class Mode(Enum):
    """What a round is for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


class AfterRound(Enum):
    """What a stage does by itself when it has done all of a training round.

    STEP: steps its optimizer (and a scheduler that steps with it); the next round may begin.
    HOLD: waits for the driver, which has to look at all stages first: a gradient norm, a loss.
    NOTHING: gradients add up.
    """

    STEP = "step"
    HOLD = "hold"
    NOTHING = "nothing"


class MicrobatchMeta(NamedTuple):
    """One micro-batch of one round.

    Attributes:
        round: counts train steps, evaluations and predictions together; unique in a generation.
        step: the optimizer step that this round is or follows; seeds dropout, names errors.
        microbatch: index in the round.
        num_microbatches: micro-batches in the round.
        accumulated: micro-batches whose gradients this step has already, from earlier rounds.
        num_samples: samples in this micro-batch.
        total_samples: samples in the round.
        mode: what the round is for.
        end: what a stage does after the round.
        version: the number under which stages keep what they are after the round; 0: they do not.
        save: whether that goes to a disk.
        drawn: the number of the `BatchIndices` whose samples these are; 0: the driver has them.
    """

    round: int
    step: int
    microbatch: int
    num_microbatches: int
    accumulated: int
    num_samples: int
    total_samples: int
    mode: Mode
    end: AfterRound = AfterRound.NOTHING
    version: int = 0
    save: bool = False
    drawn: int = 0

    @property
    def draw(self) -> int:
        """The micro-batch's number in the whole step, which its random numbers come from."""
        return self.accumulated + self.microbatch

    @property
    def weight(self) -> float:
        """This micro-batch's share of the round: what its mean loss counts."""
        return self.num_samples / self.total_samples


class Bundle(NamedTuple):
    """The micro-batches of one message, as every stage is asked for them.

    Attributes:
        number: which bundle of the round, from 0.
        num_bundles: bundles in the round.
        works: its micro-batches, in order; never empty.
    """

    number: int
    num_bundles: int
    works: tuple[MicrobatchMeta, ...]

    @property
    def round(self) -> int:
        """That of all its micro-batches."""
        return self.works[0].round

    @property
    def step(self) -> int:
        """That of all its micro-batches."""
        return self.works[0].step

    @property
    def mode(self) -> Mode:
        """What the round is for."""
        return self.works[0].mode

    @property
    def end(self) -> AfterRound:
        """What a stage does after the round."""
        return self.works[0].end


def bundles(works: Sequence[MicrobatchMeta], per_message: int) -> list[Bundle]:
    """A round's micro-batches as bundles of at most `per_message`, of nearly equal sizes."""
    left = iter(works)
    sizes = microbatch.sizes(len(works), num_bundles(len(works), per_message))
    return [
        Bundle(number, len(sizes), tuple(itertools.islice(left, size)))
        for number, size in enumerate(sizes)
    ]


class BatchIndices(NamedTuple):
    """A mini-batch that stages load themselves: which samples of which dataset.

    Attributes:
        number: unique in a generation, from 1.
        dataset: "train" or "test".
        epoch: counted from 1.
        batch: its index in the epoch; random transforms draw from (seed, epoch, batch).
        samples: their indices, in order.
    """

    number: int
    dataset: str
    epoch: int
    batch: int
    samples: list[int]

    @property
    def num_samples(self) -> int:
        """How many."""
        return len(self.samples)

    @property
    def place(self) -> tuple[int, int]:
        """Where in the run it is."""
        return self.epoch, self.batch


class DatasetInfo(NamedTuple):
    """What a stage that loads samples has built.

    Attributes:
        host: where.
        sizes: samples in each dataset, by "train" and "test".
    """

    host: str
    sizes: dict[str, int]


def microbatches_of(bundle: Bundle, numbers: Sequence[int]) -> list[int]:
    """The micro-batches in the bundles with these numbers, of the round that `bundle` is of."""
    sizes = microbatch.sizes(bundle.works[0].num_microbatches, bundle.num_bundles)
    firsts = list(itertools.accumulate(sizes, initial=0))
    return [index for number in numbers for index in range(firsts[number], firsts[number + 1])]


class StepReport(NamedTuple):
    """What a stage says after an optimizer step.

    Attributes:
        step: which one.
        busy_seconds: by kind of action ("F", "B", "W", "O"), since the step before.
        learning_rates: of its parameter groups; none without trainable parameters, or where an own
            optimizer calls them otherwise than "lr".
    """

    step: int
    busy_seconds: dict[str, float]
    learning_rates: list[float]

    @property
    def learning_rate(self) -> float | None:
        """Of the first parameter group."""
        return self.learning_rates[0] if self.learning_rates else None


class StageOutputs(NamedTuple):
    """A stage's answer to one reader, for one micro-batch; a bundle's answer is a list of them.

    Attributes:
        value: the output, or the part of it that was asked for: a tree of host tensors.
        token: while training, where no tensor of `value` is differentiable, an empty tensor that
            is: distributed autograd must find its way to every stage.
        narrowed: which tensors of `value`, float32 where they come from and go to, travel as the
            config's `wire_dtype`.
        reports: with the first micro-batch of a step, what this stage and all that it reads have
            to say of the step before, by stage: like this the driver hears of any number of stages
            in one message.
    """

    value: Any
    token: torch.Tensor | None = None
    narrowed: tuple[int, ...] = ()
    reports: dict[str, StepReport] | None = None


class Trained(NamedTuple):
    """What a train step gives, or one micro-batch of it.

    Attributes:
        loss: the mean loss, or the micro-batch's part of it.
        reports: what the stages say of the step before, by stage; empty where that is unknown.
    """

    loss: float
    reports: dict[str, StepReport]


class Evaluated(NamedTuple):
    """The sink's answer to an evaluation.

    Attributes:
        loss, metrics: each a mean over the micro-batch.
        outputs: what they were computed from, where the driver has metrics of its own.
        targets: and the targets, where the driver has not loaded them.
    """

    loss: float
    metrics: dict[str, float]
    outputs: Any = None
    targets: Any = None


class GradientPart(NamedTuple):
    """Gradients of several parameters on their way between workers that sum them.

    Attributes:
        values: flat, on the host, of one dtype.
        has: which of the parameters' gradients exist.
    """

    values: torch.Tensor
    has: tuple[bool, ...]
