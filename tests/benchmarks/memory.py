"""Memory of a stage by the number of micro-batches, with which it must not grow.

python -m tests.benchmarks.memory

A micro-batch's activations have 64 times the bytes of the weights. Compares each stage's peak above
its memory after the model was built, with 64 micro-batches per step and with 8 of the same size;
both runs compute equally many in all. With MALLOC_MMAP_THRESHOLD_=4194304 the peak is the memory in
use; without it the allocator's reserve counts too, which differs from run to run.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from tests.support.processes import JobFolder, rpcmp

PAIRS = 5
FEW, MANY = 8, 64
SAMPLES = 64

JOB = """
steps = {steps}
loss = "torch.nn:MSELoss"
schedule = "zero-bubble"
num_microbatches = {count}
[model]
layers = "rpcmp.tools.bench.models:wide"
num_stages = 2
kwargs = {{ num_stages = 2, width = 65536 }}
[data]
batch_size = {batch_size}
[data.train]
callable = "rpcmp.tools.bench.models:vectors"
kwargs = {{ num_samples = 4096, features = 1 }}
"""


def peaks(folder: JobFolder, count: int) -> dict[str, int]:
    """Return the bytes above idle of each stage."""
    config = folder.config(
        JOB.format(count=count, steps=6 * MANY // count, batch_size=count * SAMPLES)
    )
    result = rpcmp("drive", config, "--json")
    if result.code != 0:
        raise RuntimeError(result.err)
    memory = result.event("summary")["memory"]
    return {stage: found["peak"] - found["idle"] for stage, found in memory.items()}


def main() -> None:
    """Measure in turn, and print medians and the ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = JobFolder(Path(name) / "job")
        pairs = [(peaks(folder, FEW), peaks(folder, MANY)) for _ in range(PAIRS)]
    for stage in pairs[0][0]:
        few, many = (statistics.median(pair[i][stage] for pair in pairs) for i in range(2))
        ratios = [pair[1][stage] / pair[0][stage] for pair in pairs]
        print(
            f"{stage}: {few / 2**20:.0f} MiB above idle with {FEW} micro-batches, "
            f"{many / 2**20:.0f} with {MANY}; ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}, {PAIRS} pairs)"
        )


if __name__ == "__main__":
    main()
