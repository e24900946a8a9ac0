"""Streams in one process: their order, their positions, and what reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.data.batches import Loaded, create_dataset
from rpcmp.data.loading import evaluation_batches, training_batches
from rpcmp.data.stream_shares import Position
from rpcmp.data.streams import PassReader, StreamPass, StreamReader
from rpcmp.errors import ConfigError
from tests.support.forkedcall import in_a_fork
from tests.support.streamjobs import SIZE, config, shards, stream


def ends(batch: Loaded | None) -> list[float]:
    """Return the first number of each target, which tells the samples."""
    assert batch is not None
    return [round(float(number), 6) for number in batch.targets[:, 0]]


def whole(config: Config) -> list[list[float]]:
    with closing(stream(config)) as batches:
        return [ends(batch) for batch in batches.epoch(1)]


KINDS = ["Plain", "Shared", "Kept", "Iterated", "Unkept", "Shuffled"]


@pytest.mark.parametrize("name", KINDS)
def test_a_stream_yields_full_mini_batches_pass_after_pass(name: str) -> None:
    found = whole(config(name))
    assert [len(batch) for batch in found] == [SIZE] * 20
    assert found == whole(config(name))
    assert len({number for batch in found for number in batch}) > 18 * SIZE  # all is drawn


@pytest.mark.parametrize(
    ("num_workers", "names"),
    [
        ("0", KINDS),
        ("1", ["Kept"]),
        ("3", ["Shared", "Kept"]),
        *(pytest.param(number, KINDS, marks=pytest.mark.cluster) for number in "13"),
    ],
)
def test_a_stream_goes_on_from_each_position_with_the_same_bits(
    num_workers: str, names: list[str]
) -> None:
    in_a_fork(require_that_they_go_on, num_workers, *names)


def test_streams_of_packages_go_on_from_each_position_with_the_same_bits(tmp_path: Path) -> None:
    """In one process, which imports them once."""
    in_a_fork(require_that_packages_go_on, str(shards(tmp_path / "shards")))


def require_that_packages_go_on(folder: str) -> None:
    for name, more in (
        ("datasets", {"collate": "tests.zoo.streams:columns"}),
        ("webdataset", {"kwargs": {"folder": folder}}),
        ("torchdata", {"kwargs": {"samples": 44}}),
    ):
        for num_workers in (0, 2):
            if (name, num_workers) != ("torchdata", 2):  # it does not divide itself
                require_that_it_goes_on(f"of_{name}", num_workers, name != "webdataset", **more)


def require_that_they_go_on(num_workers: str, *names: str) -> None:
    for name in names:
        require_that_it_goes_on(name, int(num_workers), name in ("Kept", "Iterated"))


def require_that_it_goes_on(name: str, num_workers: int, keeps_state: bool, **more: Any) -> None:
    job = config(name, num_workers=num_workers, steps=9, **more)
    expected, positions = [], []
    with closing(stream(job)) as batches:
        for number, batch in enumerate(batches.epoch(1), 1):
            expected.append(ends(batch))
            positions.append(batches.position_after(number))
    for done in (1, 3, 5):
        position = positions[done - 1]
        assert position is not None
        skipped: list[Position] = []
        with closing(stream(job)) as after:
            after.seek(position.dump(), skipped.append)
            assert [ends(batch) for batch in after.epoch(1, done)] == expected[done:]
        assert position.is_read_again == (not keeps_state)
        assert len(skipped) == (done if position.is_read_again else done % max(1, num_workers))


class Numbers(torch.utils.data.IterableDataset[tuple[int, int]]):
    """The numbers of a pass, without anything drawn."""

    def __init__(self, samples: int = 24) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((n, n) for n in range(self._samples))


def numbers(num_workers: int, steps: int, samples: int = 24, size: int = 4) -> list[list[int]]:
    train = {"callable": f"{__name__}:Numbers", "kwargs": {"samples": samples}}
    data = {"train": train, "batch_size": size, "num_workers": num_workers}
    model = {"layers": "m:layers", "num_stages": 2}
    job = parse_config({"loss": "m:l", "model": model, "data": data, "steps": steps})
    with closing(stream(job)) as batches:
        return [batch.targets.tolist() for batch in batches.epoch(1)]


def test_a_process_of_two_takes_each_second_sample_in_every_pass() -> None:
    in_a_fork(require_shares)
    assert numbers(0, 3, samples=6) == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]


def require_shares() -> None:
    assert numbers(2, 8) == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
        [16, 18, 20, 22],
        [17, 19, 21, 23],
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]
    with pytest.raises(ConfigError, match=r"no samples for process 3 of 3: data.num_workers may"):
        numbers(3, 6, samples=2)


def test_a_process_of_a_driver_reads_the_same() -> None:
    """It is spawned, and builds the stream itself."""
    in_a_fork(require_that_the_driver_reads)


def require_that_the_driver_reads() -> None:
    job = config("Shared", num_workers=1, steps=5)
    with closing(training_batches(job)) as batches:
        assert [ends(batch) for batch in batches.epoch(1)] == whole(job)


def test_a_dataset_that_divides_itself_is_not_divided_again() -> None:
    in_a_fork(require_own_shares)


def require_own_shares() -> None:
    found = whole(config("Shared", num_workers=2, steps=4))
    assert [min(numbers) > 50 for numbers in found] == [False, True, False, True]


def test_a_stream_without_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.train yields no samples"):
        numbers(0, 2, samples=0)


def test_a_generator_ends_after_its_pass() -> None:
    with closing(stream(config("once"))) as batches:
        found = batches.epoch(1)
        assert len(list(itertools.islice(found, 2))) == 2
        with pytest.raises(ConfigError, match="yields nothing in pass 2 over it"):
            next(found)


def test_a_stage_reads_the_same_mini_batches() -> None:
    in_a_fork(require_that_a_stage_reads)


def require_that_a_stage_reads() -> None:
    for name, num_workers in (("Plain", 0), ("Kept", 2)):
        job = config(name, num_workers=num_workers, steps=6)
        expected = whole(job)
        reader = StreamReader(job)
        assert [ends(reader.load((1, n, list(range(SIZE))))) for n in range(6)] == expected
        late = StreamReader(job)
        late.seek(reader.position)
        if name == "Plain":
            assert [late.load((1, n, list(range(SIZE)))) for n in range(6)] == [None] * 6
        reader._batches.close()
        late._batches.close()


def test_settings_that_need_a_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no length: say with `steps`"):
        stream(config(steps=None, epochs=2))
    with pytest.raises(ConfigError, match="no indices to sample"):
        stream(config(sampler="m:sampler"))
    scheduler = {"callable": "torch.optim.lr_scheduler:StepLR", "kwargs": {"step_size": 1}}
    with pytest.raises(ConfigError, match='no epochs: set scheduler_interval = "step"'):
        stream(config(scheduler=scheduler, scheduler_interval="epoch"))


def test_an_evaluation_is_one_pass() -> None:
    job = config(test="Plain")
    test = evaluation_batches(job)
    assert isinstance(test, StreamPass)
    found = list(test.epoch(1))
    assert [batch.num_samples for batch in found] == [*[8] * 6, 2]
    assert [ends(one) for one in test.epoch(1, 5)] == [ends(one) for one in found[5:]]
    assert job.data is not None
    assert job.data.test is not None
    reader = PassReader(create_dataset(job.data.test, "data.test", 0), job)
    assert len(reader) == 50
    for index in (0, 6, 0, 1):
        samples = list(range(2 if index == 6 else 8))
        assert ends(reader.load((1, index, samples))) == ends(found[index])
    second = PassReader(create_dataset(job.data.test, "data.test", 0), job)  # of a further process
    assert ends(second.load((1, 1, list(range(8))))) == ends(found[1])
    with pytest.raises(ConfigError, match="does not yield its 50 samples each time"):
        reader.load((1, 3, [0]))
    shuffled = evaluation_batches(config(test="Shuffled"))
    assert shuffled is not None
    assert [ends(one) for one in shuffled.epoch(2)] == [ends(one) for one in shuffled.epoch(2)]
    with pytest.raises(ConfigError, match=r"data.test is a generator, which can be read only once"):
        evaluation_batches(config(test="once"))


def test_a_collate_function_that_makes_nothing_is_told() -> None:
    job = config(collate="tests.zoo.streams:nothing")
    with pytest.raises(ConfigError, match="a mini-batch is NoneType"):
        next(stream(job).epoch(1))


def test_a_failure_is_the_same_for_all_later_mini_batches() -> None:
    reader = StreamReader(config("Failing"))
    for index in (1, 0, 2):
        with pytest.raises(ValueError, match="a broken file"):
            reader.load((1, index, list(range(SIZE))))
