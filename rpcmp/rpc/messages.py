"""Messages between the driver and the stages, and the calls that stages make of each other.

    RoundHeader     what all micro-batches of a round share
    Bundle          a header and a number: the micro-batches of one message
    MicrobatchMeta  one micro-batch; computed from the header, so it never travels

A bundle is one micro-batch, or `microbatches_per_message` of them. A message costs about two
milliseconds of CPU, whatever it contains, so stages that compute for less are faster with fewer
messages. Schedules, rounds and distributed autograd see only bundles. Computing, drawing random
numbers and summing still go micro-batch by micro-batch, so bits do not depend on the bundles.

Every bundle has the header of its round. Messages overtake each other and rounds are aborted: with
the header in each of them, any message can start its round at a stage, and no stage keeps headers
that a late message could miss. A bundle is 142 bytes of pickle, however many micro-batches it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch.futures import Future

from rpcmp.config.topology import cut_into_bundles
from rpcmp.pipelining import microbatches, pytree
from rpcmp.rpc.shared_memory import SharedTensor, is_worth_sharing


class Mode(Enum):
    """What a round is for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


class AfterRound(Enum):
    """What a stage does by itself after a training round.

    STEP: steps its optimizer (and a scheduler that steps with it); the next round may start.
    HOLD: waits for the driver, which first looks at all stages: a gradient norm, a loss.
    NOTHING: gradients accumulate.
    """

    STEP = "step"
    HOLD = "hold"
    NOTHING = "nothing"


class RoundHeader(NamedTuple):
    """A train step, an evaluation or a prediction of one mini-batch.

    Attributes:
        number: counts train steps, evaluations and predictions together; unique per generation.
        step: the optimizer step that the round is for or follows; seeds dropout, names errors.
        per_message, in_turns: how its micro-batches are cut, see `topology.cut_into_bundles`.
        accumulated: micro-batches of earlier rounds whose gradients this step already has.
        version: the number of the snapshot that stages take after the round; 0: none.
        save: whether that snapshot goes to a disk.
        batch_id: the `BatchIndices` that the stages load; 0: the driver has the samples.
    """

    number: int
    step: int
    mode: Mode
    num_samples: int
    num_microbatches: int
    per_message: int
    in_turns: bool = False
    accumulated: int = 0
    after: AfterRound = AfterRound.NOTHING
    version: int = 0
    save: bool = False
    batch_id: int = 0

    @property
    def is_training(self) -> bool:
        return self.mode is Mode.TRAIN

    def bundles(self) -> list[Bundle]:
        return [Bundle(self, number) for number in range(self.num_bundles)]

    def indices_in(self, bundles: Iterable[int]) -> list[int]:
        """Return the indices of the micro-batches in the bundles with these numbers."""
        cut = self._cut
        return [index for number in bundles for index in cut[number]]

    @property
    def num_bundles(self) -> int:
        return len(self._cut)

    @property
    def _cut(self) -> tuple[range, ...]:
        return cut_into_bundles(self.num_microbatches, self.per_message, self.in_turns)

    def microbatches(self, indices: Iterable[int]) -> list[MicrobatchMeta]:
        return [
            MicrobatchMeta(
                self,
                index,
                len(microbatches.samples_of(index, self.num_samples, self.num_microbatches)),
            )
            for index in indices
        ]


class MicrobatchMeta(NamedTuple):
    """One micro-batch of a round, whose micro-batches are numbered from 0."""

    round: RoundHeader
    number: int
    num_samples: int

    @property
    def draw(self) -> int:
        """The micro-batch's number in the whole step, which seeds its random numbers."""
        return self.round.accumulated + self.number

    @property
    def weight(self) -> float:
        """This micro-batch's share of the round's samples, which weights its mean loss."""
        return self.num_samples / self.round.num_samples


class LossWeight(NamedTuple):
    """What a micro-batch's mean loss counts, in units of the config's `loss_weight`.

    Attributes:
        own, total: that of the micro-batch, and that of the whole mini-batch.
    """

    own: float
    total: float

    @property
    def share(self) -> float:
        return self.own / self.total


class Bundle(NamedTuple):
    """The micro-batches of one message; a round's bundles are numbered from 0."""

    round: RoundHeader
    number: int

    @property
    def microbatches(self) -> list[MicrobatchMeta]:
        """The micro-batches in order; never empty."""
        return self.round.microbatches(self.round.indices_in([self.number]))


class BatchIndices(NamedTuple):
    """A mini-batch that stages load themselves, as the indices of its samples.

    Attributes:
        batch_id: unique per generation, from 1 without a gap, since stages load in that order.
        dataset: "train" or "test".
        epoch: counted from 1.
        batch: index in the epoch; random transforms draw from (seed, epoch, batch).
        num_microbatches: into how many it will be cut; 0 if no loader has to know.
        stream: where a stream has to go on with this mini-batch; "": after the one before.
    """

    batch_id: int
    dataset: str
    epoch: int
    batch: int
    samples: list[int]
    num_microbatches: int = 0
    stream: str = ""

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.batch


class DatasetInfo(NamedTuple):
    """The datasets that a stage has built.

    Attributes:
        sizes: samples in each dataset, by "train" and "test"; 0: it is a stream.
        streams: which of them are read in order, and not by indices.
    """

    host: str
    sizes: dict[str, int]
    streams: list[str]


class VariableUse(NamedTuple):
    """What a stage has of a variable outside of modules; see `rpcmp.worker.state.variables_watch`.

    Attributes:
        change: empty if it has not changed since the last look.
        is_filled: whether it is another than when the stage was built.
        content: of the value, or by key of a dict: how many numbers there are, and sums of them;
            empty of anything else, and if that moves.
        of_samples: whether it is another thing for other samples.
        carries: whether outputs depend on what the stage has filled in.
        has_tensors: whether it holds tensors or arrays, and not what a process knows of itself.
    """

    change: str
    is_filled: bool
    content: dict[str, tuple[float, ...]]
    of_samples: bool = False
    carries: bool = False
    has_tensors: bool = False


class StepReport(NamedTuple):
    """A stage's figures of one optimizer step.

    Attributes:
        busy_seconds: by kind of action ("F", "B", "W", "O"), since the step before.
        core_seconds: in which the compute thread had a core, "used", or waited for one, "waited".
        learning_rates: of its parameter groups. Empty without trainable parameters, or if the
            user's optimizer does not call them "lr".
        variables: outside of modules that the stage's code reaches, by name. None: this step did
            not look.
    """

    step: int
    busy_seconds: dict[str, float]
    core_seconds: dict[str, float]
    learning_rates: list[float]
    variables: dict[str, VariableUse] | None = None

    @property
    def learning_rate(self) -> float | None:
        return self.learning_rates[0] if self.learning_rates else None


class StageOutputs(NamedTuple):
    """A stage's answer to one reader for one micro-batch. A bundle's answer is a list of them.

    Attributes:
        value: the output, or the part of it that the port reads: a tree of tensors.
        token: in training, an empty differentiable tensor if torch RPC carries none of `value`:
            distributed autograd must find its way to every stage.
        narrowed: which tensors of `value` are float32 at both ends and travel as the config's
            `wire_dtype`.
        weight: with targets, what the loss counts; None: samples.
        reports: with the first micro-batch of a step, the reports of the step before by this stage
            and all that it reads, by stage. So the driver gets any number of stages' results in
            one message.
        shared: the tensors of `value`, in order, if they lie in shared memory, where their
            gradients go as well. While the answer travels they are in `value` themselves.
    """

    value: Any
    token: torch.Tensor | None = None
    narrowed: tuple[int, ...] = ()
    reports: dict[str, StepReport] | None = None
    weight: LossWeight | None = None
    shared: tuple[SharedTensor, ...] = ()

    def lent(self) -> StageOutputs:
        """Return an answer that is sent for certain, with what its reader gets of `value`."""

        def lend(leaf: Any) -> Any:
            return leaf.lend() if isinstance(leaf, SharedTensor) else leaf

        return self._replace(value=pytree.map_leaves(lend, self.value))

    def opened(self) -> StageOutputs:
        """Return an answer that has arrived, with plain tensors in `value`."""
        if isinstance(self.value, torch.Tensor):
            return self
        shared: list[SharedTensor] = []

        def tensor_of(leaf: Any) -> Any:
            if not isinstance(leaf, SharedTensor):
                return leaf
            shared.append(leaf)
            return leaf.tensor.requires_grad_(leaf.requires_grad)

        value = pytree.map_leaves(tensor_of, self.value)
        return self._replace(value=value, shared=tuple(shared)) if shared else self


class Trained(NamedTuple):
    """The result of a train step, or of one of its micro-batches.

    Attributes:
        loss: the mean loss, or the micro-batch's part of it.
        reports: of the step before, by stage; empty if unknown.
    """

    loss: float
    reports: dict[str, StepReport]


class Evaluated(NamedTuple):
    """The sink's answer to an evaluation.

    Attributes:
        loss, metrics: each a mean over the micro-batch.
        outputs: the sink's outputs, if the driver computes metrics.
        targets: their targets, if the driver has not loaded them.
        weight: what the loss counts; None: samples.
    """

    loss: float
    metrics: dict[str, float]
    outputs: Any = None
    targets: Any = None
    weight: float | None = None


class GradientPart(NamedTuple):
    """Gradients of several parameters on their way between the workers that sum them.

    Attributes:
        values: flat, on the host, of one dtype.
        has: whether each parameter has a gradient.
        shared: where `values` lie in shared memory, if they do.
    """

    values: torch.Tensor
    has: tuple[bool, ...]
    shared: SharedTensor | None = None

    def sent(self, elements: slice = slice(None)) -> GradientPart:
        """Return what torch RPC carries of some elements."""
        return GradientPart(self.values[elements], self.has)

    def lend(self, elements: slice = slice(None)) -> GradientPart:
        """Return what a reader that shares memory gets of some elements."""
        if self.shared is None or not is_worth_sharing([self.values[elements]]):
            return self.sent(elements)
        lent = self.shared.lend(elements)
        if isinstance(lent, torch.Tensor):
            return GradientPart(lent, self.has)
        return GradientPart(torch.empty(0), self.has, lent)

    def opened(self) -> GradientPart:
        """Return a part that has arrived, with its values."""
        return self if self.shared is None else self._replace(values=self.shared.tensor)


TensorKey = tuple[int, str]
"""Names tensors in a worker's mailbox: the number of a round, and what they are in it."""


class Peer(Protocol):
    """Another worker of the group, and the calls that stages make of each other.

    Each call is answered by the method of the same name of `rpcmp.worker.stage.Stage`. A future's
    value is the answer, or a Raised.
    """

    @property
    def name(self) -> str: ...

    def forward(self, bundle: Bundle, port: int) -> Future[Any]:
        """Return the answer to one reader; `Stage.forward` is also told if memory is shared."""

    def mark_none_gradients(
        self, round_number: int, microbatch: int, port: int, tensors: list[int]
    ) -> Future[Any]: ...

    def gradient_part(self, rank: int, round_number: int, bucket: int) -> Future[Any]: ...

    def gradient_total(self, round_number: int, bucket: int) -> Future[Any]: ...

    def get_tensors(self, key: TensorKey) -> Future[Any]: ...
