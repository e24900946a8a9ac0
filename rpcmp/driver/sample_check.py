"""Try before the first step that samples do not depend on those that are computed with them.

    samples 0 and 1 in one micro-batch    ──> outputs ──┐
    each of them in a micro-batch         ──> outputs ──┴─> equal, but for rounding?

If not, training in micro-batches is not training on the mini-batch: the first dimension is time,
say, or a layer centers its inputs, or carries on what it has kept of the micro-batch before. This
is an evaluation, so batch normalization and dropout are off. A module that is cut was compared
where it was cut, by `rpcmp.splitting.proof`, with its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rpcmp.config.schema import Config
from rpcmp.config.topology import SOURCES
from rpcmp.data.batches import Loaded
from rpcmp.errors import ConfigError, DeviceLostError, StageConfigError, StageError
from rpcmp.pipelining import pytree

ROUNDING = {torch.float64: 1e-8, torch.float32: 0.01}
"""How far outputs may be apart, in parts of the largest; LOW_ROUNDING of other dtypes.

Layers may compute in less precision than their outputs have.
"""

LOW_ROUNDING = 0.2

Predict = Callable[[Any, int, int], list[Any]]
"""Returns the outputs of each micro-batch, for inputs, the number of micro-batches, and that of a
step, which seeds what layers draw."""


def require_independent(config: Config, batch: Loaded, predict: Predict) -> None:
    """Check two pairs of samples of a mini-batch.

    A difference counts if both have one: a decision that hangs on the last bit is no dependence.

    Raises:
        ConfigError: outputs of samples depend on other samples.
    """
    graph = config.graph()
    if any(each.producer == SOURCES[1] for read in graph.inputs.values() for each in read):
        return  # there are no targets without a loss
    reason = ""
    for first in (0, 2):
        if first and batch.num_samples < first + 2:
            break
        two = pytree.map_tensors(lambda tensor: tensor[first : first + 2], batch.inputs)  # noqa: B023
        try:
            (together,), apart = predict(two, 1, 0), predict(two, 2, 0)
            reason = next(_differences(together, apart), "")
            if not reason or _draws(predict, two, together):
                return
        except (StageConfigError, DeviceLostError):
            raise
        except (StageError, ValueError, TypeError, RuntimeError):
            return  # it cannot do with single samples, or returns no tensors of samples
    if reason:
        raise ConfigError(
            f"{reason}: the first dimension does not count samples, or a layer mixes or carries on "
            "what it computes of them, so micro-batches are no mini-batch; put the samples first, "
            'set num_microbatches = 1, or loss_scope = "micro-batch" if that is meant'
        )


def _draws(predict: Predict, two: Any, together: Any) -> bool:
    """Whether outputs differ by random numbers that are drawn in evaluations, too."""
    carries_on = any(_differences(together, predict(two, 1, 0)))  # with the same random numbers
    return not carries_on and any(_differences(together, predict(two, 1, 1)))


def _differences(together: Any, apart: list[Any]) -> Iterator[str]:
    pairs = [list(pytree.leaves_with_path(each)) for each in apart]
    for (path, whole), *pieces in zip(pytree.leaves_with_path(together), *pairs, strict=True):
        name = ".".join(map(str, path))
        what = f"output {name!r}" if name else "the output"
        if not isinstance(whole, Tensor) or not whole.dim():
            continue
        joined = torch.cat([piece for _, piece in pieces])
        if joined.shape != whole.shape:
            shapes = f"{list(whole.shape)} of two samples, and {list(joined.shape)} of each alone"
            yield f"{what} has the shape {shapes}"
        elif whole.is_floating_point() and whole.numel():
            gap = float((joined - whole).abs().nan_to_num().max())
            largest = float(whole.abs().nan_to_num().max())
            if gap > ROUNDING.get(whole.dtype, LOW_ROUNDING) * largest:
                yield (
                    f"{what} of two samples computed together is up to {gap:.3g} apart from that "
                    f"of each alone, of numbers up to {largest:.3g}"
                )
