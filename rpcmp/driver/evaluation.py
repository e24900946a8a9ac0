"""What an evaluation gives: means over samples, put together from parts of any size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rpcmp.pipelining import microbatch


@dataclass(frozen=True)
class Evaluation:
    """What came of the samples that were evaluated.

    Attributes:
        num_samples: how many.
        loss: the mean loss.
        metrics: by name: the mean over the samples, or what the `compute` of a metric that keeps a
            state gave for all of them ("name.key" for each key, where that is a dict).
    """

    num_samples: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


def mean(parts: Iterable[Evaluation]) -> Evaluation:
    """The evaluation of all parts together, each weighted by its samples."""
    parts = list(parts)
    total = sum(part.num_samples for part in parts)

    def weighted(values: Iterable[float]) -> float:
        pairs = zip(parts, values, strict=True)
        return microbatch.exact_sum(part.num_samples / total * value for part, value in pairs)

    names = parts[0].metrics if parts else {}
    return Evaluation(
        total,
        weighted(part.loss for part in parts),
        {name: weighted(part.metrics[name] for part in parts) for name in names},
    )
