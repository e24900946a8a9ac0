"""Speed-up by replicas of a stage, and cost of the exchange of their gradients.

    python -m tests.benchmarks.replicas                            both, 9 pairs each
    python -m tests.benchmarks.replicas step --pairs 15
    python -m tests.benchmarks.replicas exchange --megabytes 100
    python -m tests.benchmarks.replicas exchange --apart

step: `rpcmp/examples/residual_ddp.toml`, grown until a step takes some 400 ms in one process, with
SGD. Its one stage has two replicas with one thread each, on stage servers that the benchmark starts
as `rpcmp drive` does. Against them, on the same mini-batches, cut into the same
micro-batches: a plain PyTorch loop in one process with one thread, and `DistributedDataParallel`
over Gloo in two processes with one thread each. The time of a round, from the start of its first
step to the end of its last one, is divided by the number of steps. Our driver loads the data
meanwhile; the others have loaded theirs before. All losses must agree.

exchange: the time from when all processes have their gradients, 50 MB of float32, until each of
them has the sum, several times in a row. Ours: parameters of 1 MB each, all buckets of
`rpcmp.worker.bucket_allreduce` started at once and finished, over torch RPC as between
workers; copies from the gradients and back are in it. With --apart as between hosts: by sockets.
Gloo: `all_reduce` of one tensor of 50 MB. Nothing is computed besides, so nothing is hidden behind
a backward. 2 and 4 processes with one thread each.

Contestants live in processes of their own and run in turn, round by round; ratios are taken within
a round, their interval is that of the sign test. Nine pairs are the fewest whose 95 % interval
leaves out the extremes. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence

from rpcmp.errors import ConfigError, RpcmpError, UnsupportedJobError
from rpcmp.process.channel import Message
from rpcmp.tools.bench import benchmark, cases
from rpcmp.tools.bench.benchmark import ContestantTimes
from rpcmp.tools.bench.cases import Case
from rpcmp.tools.bench.contestants import Contestant, OwnPipeline, PeerGroup, peer
from rpcmp.tools.measurement import Estimate, paired_ratio, spread
from tests.support.places import EXAMPLES, ROOT

EXAMPLE = EXAMPLES / "residual_ddp.toml"

NUM_REPLICAS = 2

GROWN = (
    "stages.0.kwargs={ blocks = 6, width = 64 }",
    "data.batch_size=128",
    # Small steps: sums in another order would else become other losses after some dozen of them.
    "optimizer={ callable = 'torch.optim:SGD', kwargs = { lr = 1e-5 } }",
)
"""Overrides that make a step of the example worth two processes."""

FASTER, NO_SLOWER = 1.85, 0.97
"""Goals: one process / ours; ours / DistributedDataParallel."""

EXCHANGE = {2: 0.8, 4: 1.0}
"""Goals for numbers of replicas: ours / Gloo."""


def step(options: argparse.Namespace) -> None:
    """Compare two replicas with one process, and with DistributedDataParallel."""
    job = _job(options.set)
    _require_equal_work(job)
    contestants = [OwnPipeline(_replicated(job)), _one_process(job), _data_parallel(job)]
    mine, one, ddp = _compare(contestants, options)
    benchmark.require_equal_losses([mine, one, ddp])
    print(f"{NUM_REPLICAS} replicas: {_milliseconds(mine)} a step")
    gain = paired_ratio(one.seconds, mine.seconds)
    print(f"one process: {_milliseconds(one)}; as many times faster: {_shown(gain)}")
    print(f"  asked: at least {FASTER:.2f}, {_verdict(gain.median >= FASTER)}")
    _print_ratio("DistributedDataParallel", mine, ddp, NO_SLOWER)


def exchange(options: argparse.Namespace) -> None:
    """Compare the sum of gradients with an all-reduce, of 2 and of 4 processes."""
    for count in (2, 4):
        job = {"bytes": round(options.megabytes * 1e6), "apart": options.apart}
        mine, gloo = _compare(
            [
                _ranks(f"sum of {count}", "exchange:Sum", count, job),
                _ranks(f"all-reduce of {count}", "exchange:AllReduce", count, job),
            ],
            options,
        )
        print(f"{options.megabytes:g} MB between {count} replicas: {_milliseconds(mine)}")
        _print_ratio("Gloo's all_reduce", mine, gloo, EXCHANGE[count])


def _job(overrides: Sequence[str]) -> Case:
    """Return the job that all train, with one worker."""
    one_worker = ("stages.0.replicas=1", "stages.0.threads=1")
    return cases.load(str(EXAMPLE), overrides=[*GROWN, *overrides, *one_worker])


def _replicated(case: Case) -> Case:
    """Return the same job with several replicas."""
    stage = case.config.stage(0).model_copy(update={"replicas": NUM_REPLICAS})
    return dataclasses.replace(case, config=case.config.model_copy(update={"stages": [stage]}))


def _require_equal_work(case: Case) -> None:
    """Fail if the means of DistributedDataParallel's ranks would not make the mini-batch's.

    Raises:
        ConfigError: the replicas would not have equally many samples in equal micro-batches.
    """
    count, data = case.config.num_microbatches, case.config.data
    samples = 0 if data is None else data.batch_size
    if count % NUM_REPLICAS or samples % count:
        raise ConfigError(
            f"num_microbatches = {count}, data.batch_size = {samples}: the first has to be a "
            f"multiple of {NUM_REPLICAS}, the second one of the first"
        )


def _one_process(case: Case) -> Contestant:
    return peer("one process", case, "OneProcess", [1], {"batch": ["micro-batches"]})


def _data_parallel(case: Case) -> Contestant:
    config = case.config.model_dump(mode="json", exclude_unset=True)
    job = {"config": config, "folder": str(case.config.folder)}
    return _ranks("DistributedDataParallel", "dataparallel:DataParallel", NUM_REPLICAS, job)


def _ranks(name: str, trainer: str, count: int, job: Message) -> Contestant:
    """Return a contestant of `count` processes with one thread each."""
    trainer = f"tests.benchmarks.{trainer}"
    return PeerGroup(name, trainer, job, str(ROOT), [1] * count, {"way": ["the only one"]})


def _compare(
    contestants: Sequence[Contestant], options: argparse.Namespace
) -> list[ContestantTimes]:
    """Return the measurements, in the order of the contestants.

    Raises:
        UnsupportedJobError: one cannot take part.
    """
    done = asyncio.run(benchmark.compare(contestants, options.pairs, options.steps, _progress))
    for name, why in done.unsupported.items():
        raise UnsupportedJobError(f"{name}: {why}")
    print(f"{options.pairs} pairs of {done.steps}")
    return done.times


def _progress(what: str, left: float) -> None:
    print(what, file=sys.stderr)


def _print_ratio(name: str, mine: ContestantTimes, other: ContestantTimes, asked: float) -> None:
    ratio = paired_ratio(mine.seconds, other.seconds)
    print(f"{name}: {_milliseconds(other)}; ours / it: {_shown(ratio)}")
    print(f"  asked: at most {asked:.2f}, {_verdict(ratio.median <= asked)}")
    cpu = [f"{spread(each.cpu_seconds).median * 1e3:.1f} ms" for each in (mine, other)]
    ratio = paired_ratio(mine.cpu_seconds, other.cpu_seconds)
    print(f"  CPU of all processes: {cpu[0]}, {cpu[1]}; {_shown(ratio)}")


def _milliseconds(series: ContestantTimes) -> str:
    return f"{spread(series.seconds).median * 1e3:.1f} ms"


def _shown(ratio: Estimate) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}, {ratio.confidence:.0%})"


def _verdict(is_reached: bool) -> str:
    return "reached" if is_reached else "missed"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.replicas")
    parser.add_argument("what", nargs="*", metavar="step|exchange", help="both if not given")
    parser.add_argument("--pairs", type=_count, default=9, help="rounds; 9 if not given")
    parser.add_argument("--steps", type=_count, help="a round; as many as take 2 s, at least 5")
    parser.add_argument("--megabytes", type=_size, default=50.0, help="of gradients; 50")
    parser.add_argument("--apart", action="store_true", help="exchange: share no memory")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the job; repeat")
    options = parser.parse_args()
    for what in options.what:
        if what not in MEASURED:
            parser.error(f"{what!r} is not measured here: choose of {', '.join(MEASURED)}")
    return options


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _size(text: str) -> float:
    if not 0.001 <= (value := float(text)) <= 1e5:  # NaN neither
        raise argparse.ArgumentTypeError(f"{text} is not from 0.001 to 100000 MB")
    return value


MEASURED = {"step": step, "exchange": exchange}


def main() -> None:
    """Measure and print."""
    options = _options()
    try:
        for what in options.what or MEASURED:
            MEASURED[what](options)
    except RpcmpError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
