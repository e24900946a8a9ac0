"""What stages tell of variables that each process has, and which of that is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.rpc.messages import StepReport, VariableUse
from rpcmp.worker.state.variables_watch import CHANGED, COUNTED, VariablesWatch, require_not_shared

CACHE: dict[Any, Tensor] = {}
TABLE: Tensor | None = None
SHOWN: set[str] = set()
WARNED = False


def cached(x: Tensor) -> Tensor:
    global TABLE, WARNED
    if TABLE is None or len(TABLE) < len(x):
        TABLE = torch.ones(len(x))
    WARNED = WARNED or len(CACHE) > 1
    SHOWN.add(f"{len(CACHE)} entries")
    if len(CACHE) > 2:
        CACHE.clear()
    return CACHE.setdefault((len(x), x.dtype), x) * TABLE


def test_caches_flags_and_tables_that_grow_have_not_changed() -> None:
    watch = VariablesWatch([], [("loss", cached)])
    for length in range(1, 6):
        cached(torch.ones(length))
        found = watch.after_step() or {}
        assert [each.change for each in found.values()] == [""] * 4


calls = 0
SCALE: Any = None
NOTES: list[float] = []
NUMBERS: dict[Any, Any] = {}
SHARE = 0.5


def counting(x: Tensor) -> Tensor:
    global calls, SCALE
    calls += 1
    if SCALE is None:
        SCALE = x.abs().mean()
    NOTES.append(float(x.sum()))
    scaled: Tensor = x * SCALE * SHARE
    return scaled + len(NUMBERS)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    yield
    global calls, SCALE, SHARE
    calls, SCALE, SHARE = 0, None, 0.5
    NOTES.clear()
    NUMBERS.clear()


def reported(number: float, steps: int = 1) -> dict[str, VariableUse]:
    """Return what a stage tells that has multiplied such a number, each as in its own process."""
    global calls, SCALE
    calls, SCALE = 0, None
    NOTES.clear()
    watch = VariablesWatch([], [("layer", counting)])
    for _ in range(steps):
        counting(torch.full((2,), number))
        found = watch.after_step() or {}
    return {name.rpartition(":")[2]: use for name, use in found.items()}


def test_what_changes_with_each_step_is_seen_from_the_second_on() -> None:
    first = reported(2.0)
    assert {name for name, use in first.items() if use.change} == set()
    assert first["calls"].content == first["NOTES"].content == {}  # each stage's own count
    second = reported(2.0, steps=2)
    assert {name for name, use in second.items() if use.change} == {"calls", "NOTES"}
    assert second["SCALE"].is_filled
    assert second["SCALE"].content[""][:3] == (1.0, 2.0, 2.0)
    assert not second["SHARE"].is_filled
    assert second["SHARE"].content[""][:3] == (1.0, 0.5, 0.5)


def test_later_steps_are_looked_at_more_and_more_seldom() -> None:
    watch = VariablesWatch([("", nn.Linear(2, 2))])
    looks = [step for step in range(1, 70) if watch.after_step() is not None]
    assert looks == [*range(1, 9), 16, 32, 64]


def of(variables: dict[str, VariableUse] | None) -> StepReport:
    return StepReport(1, {}, {}, [], variables)


def use(
    change: str = "", is_filled: bool = False, content: dict[str, tuple[float, ...]] | None = None
) -> VariableUse:
    return VariableUse(change, is_filled, content or {})


def test_a_variable_that_two_stages_use_and_one_changes_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = of({"models:calls": use(CHANGED), "models:SIZE": use()})
    require_not_shared({"a": own, "b": of({"models:SIZE": use()}), "c": of(None)})
    for theirs in ("", COUNTED, CHANGED):
        with pytest.raises(ConfigError, match="'models:calls', which changes with each step"):
            require_not_shared({"a": own, "b": of({"models:calls": use(theirs)})})
    counts = of({"models:calls": use(COUNTED)})
    with pytest.raises(ConfigError, match="stages 'a' and 'b' both use"):
        require_not_shared({"a": counts, "b": of({"models:calls": use()})})
    require_not_shared({"a": counts, "b": counts})
    assert "models:calls counts in each stage by itself" in caplog.text


def required(one: dict[str, VariableUse], other: dict[str, VariableUse]) -> None:
    require_not_shared({"a": of(one), "b": of(other)})


@pytest.mark.parametrize(
    "scale",
    [
        lambda x: x.abs().mean(),
        lambda x: float(x.mean()),
        lambda x: numpy.array([float(x.sum()), 1.0]),
        lambda x: {"mean": x.mean()},
        lambda x: [x * 1j],
    ],
)
def test_what_each_stage_fills_in_from_its_samples_is_refused(scale: Any) -> None:
    found = []
    for number in (2.0, 2.0001, 3.0):
        globals()["SCALE"] = None
        watch = VariablesWatch([], [("layer", counting)])
        globals()["SCALE"] = scale(torch.full((2,), number))
        found.append(watch.after_step() or {})
    required(found[0], found[1])
    with pytest.raises(ConfigError, match=r"SCALE.*' is .* in the stage 'a' and .* in 'b'"):
        required(found[0], found[2])


def test_tables_that_each_process_makes_by_itself_have_to_be_equal() -> None:
    built = []
    for seed in (1, 1, 2):
        NUMBERS["state"] = torch.Generator().manual_seed(seed).get_state()
        built.append(VariablesWatch([], [("layer", counting)]).after_step() or {})
    required(built[0], built[1])
    with pytest.raises(ConfigError, match=r"NUMBERS\[state\]' is 5056 numbers with the sum"):
        required(built[0], built[2])


def test_what_a_process_knows_of_itself_is_told(caplog: pytest.LogCaptureFixture) -> None:
    built = []
    for stage in (1, 2):
        NUMBERS["own"] = [{"stage": stage, "level": 10 * stage}]
        built.append(VariablesWatch([], [("layer", counting)]).after_step() or {})
    required(*built)
    assert "NUMBERS[own]' is 2 numbers with the sum 11 in the stage 'a'" in caplog.text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(9), torch.arange(9).flip(0)),
        (torch.tensor([True, False]), torch.tensor([False, True])),
        (torch.tensor([1.0, -torch.inf]), torch.tensor([-torch.inf, 1.0])),
        ({"a": torch.ones(2)}, {"a": torch.zeros(2)}),
        (numpy.ones(2, "float32"), numpy.zeros(2, "float32")),
    ],
)
def test_order_masks_and_nested_tables_count(one: Any, other: Any) -> None:
    built = []
    for each in (one, one, other):
        NUMBERS["table"] = [each, each]
        built.append(VariablesWatch([], [("layer", counting)]).after_step() or {})
    required(built[0], built[1])
    with pytest.raises(ConfigError, match=r"NUMBERS\[table\]"):
        required(built[0], built[2])


def test_what_is_taken_from_samples_is_refused_unless_it_is_a_log_in_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def of_samples(number: float, carries: bool) -> dict[str, VariableUse]:
        content: dict[str, tuple[float, ...]] = {"": (1.0, number, number, number)}
        return {"models:X": VariableUse("", True, content, True, carries)}

    unused = {"models:X": use()}
    for one, other in [(of_samples(1.0, False), unused), (unused, of_samples(1.0, True))]:
        with pytest.raises(ConfigError, match="'models:X', which is filled in from samples"):
            required(one, other)
    with pytest.raises(ConfigError, match="'models:X', which is filled in from samples"):
        required(of_samples(1.0, False), of_samples(1.0000001, True))
    required(of_samples(1.0, False), of_samples(2.0, False))
    required(of_samples(1.0, True), of_samples(1.0, True))
    assert not caplog.text


def test_numbers_of_a_process_and_of_layers_by_themselves_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    required({"models:START": use(content={"": (1.0, 7.0, 7.0)})}, {"models:START": use()})
    assert not caplog.text
    numbers = [{"models:START": use(content={"": (1.0, n, n)})} for n in (7.0, 8.0)]
    required(*numbers)
    assert "'models:START' is 7 in the stage 'a' and 8 in 'b', which both use it" in caplog.text
    ids = [{"models:IDS": use("", True, {key: (1.0, 0.0, 0.0)})} for key in ("140", "150")]
    required(*ids)
    assert "models:IDS: each of the stages 'a' and 'b' fills in values" in caplog.text


def test_tables_for_other_lengths_flags_and_no_numbers_are_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lengths = [use("", True, {"": (n, n, n)}) for n in (4.0, 5.0)]
    required({"models:TABLE": lengths[0]}, {"models:TABLE": lengths[1]})
    required({"models:NAME": use("", True)}, {"models:NAME": use()})
    assert not caplog.text
