"""The tree of errors: how they cross process borders, and how the command line ends with them."""

from __future__ import annotations

import json
import math
import re

import pytest

from rpcmp import errors
from rpcmp.errors import RpcmpError
from tests.support.everyerror import EXAMPLES, TEXT, tree


def test_there_is_an_example_of_every_error() -> None:
    assert {type(error) for error in EXAMPLES} == tree(RpcmpError)


def test_the_docstring_draws_every_error() -> None:
    drawn = set(re.findall(r"\b[A-Z]\w+Error\b", errors.__doc__ or ""))
    assert drawn == {kind.__name__ for kind in tree(RpcmpError)}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was_sent(error: RpcmpError) -> None:
    wire = errors.to_wire(error)
    arrived = errors.from_wire(wire)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert arrived.fields == error.fields
    assert vars(arrived) == vars(error)
    assert wire.isascii()


def test_a_loss_that_is_not_a_number_arrives() -> None:
    arrived = errors.from_wire(errors.to_wire(errors.NonFiniteLossError(math.nan, 1, 0)))
    assert isinstance(arrived, errors.NonFiniteLossError)
    assert math.isnan(arrived.loss)


def test_an_unknown_error_of_a_newer_peer_is_shown_whole() -> None:
    wire = json.dumps({"type": "QuotaError", "fields": {"message": TEXT}})
    arrived = errors.from_wire(wire)
    assert type(arrived) is errors.JobError
    assert "QuotaError" in str(arrived)
    assert "Zürich" in str(arrived)


@pytest.mark.parametrize("name", ["ValueError", "Any", "exit_code", "ClassVar", "__builtins__"])
def test_only_errors_of_the_tree_are_built(name: str) -> None:
    arrived = errors.from_wire(json.dumps({"type": name, "fields": {"message": "x"}}))
    assert type(arrived) is errors.JobError


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_the_exit_code_follows_the_kind_of_the_error(error: RpcmpError) -> None:
    expected = 1
    if isinstance(error, errors.ConfigError | errors.StageConfigError):
        expected = 2
    elif isinstance(error, errors.UnavailableError):
        expected = 75
    elif isinstance(error, errors.TakenOverError):
        expected = 76
    elif isinstance(error, errors.InterruptedJobError):
        expected = 128 + 15
    assert errors.exit_code(error) == expected


def test_a_stage_error_says_where_when_and_why() -> None:
    error = errors.StageError(
        "b", "forward", "ValueError: x", step=3, microbatch=0, received="from 'a': float32[2]"
    )
    assert str(error) == (
        "stage 'b' failed in forward of micro-batch 0 at step 3: ValueError: x; "
        "it had received from 'a': float32[2]"
    )
    assert str(errors.StageError("b", "build", "why")) == "stage 'b' failed in build: why"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (KeyError("key"), "KeyError: 'key'"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_one_line_puts_an_error_on_one_line(error: Exception, line: str) -> None:
    assert errors.one_line(error) == line


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ExhaustedError", errors.RecoveryTimeoutError),
        ("ListenError", errors.AddressInUseError),
        ("OtherRunError", errors.CheckpointConflictError),
        ("UnfitError", errors.UnsupportedJobError),
    ],
)
def test_renamed_errors_keep_their_old_names_with_a_warning(
    old: str, new: type[RpcmpError]
) -> None:
    with pytest.warns(DeprecationWarning, match=f"rpcmp.errors.{old} is called {new.__name__} now"):
        assert getattr(errors, old) is new


def test_a_misspelt_error_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ConfigErorr'"):
        getattr(errors, "ConfigErorr")  # noqa: B009


def test_the_first_steps_loss_is_not_blamed_on_the_learning_rate() -> None:
    assert "look at the data, the loss and the initial weights" in str(
        errors.NonFiniteLossError(math.nan, 1, 2)
    )
    assert "try a lower learning rate" in str(errors.NonFiniteLossError(math.nan, 2, 2))


def test_the_nearest_name_may_differ_in_case_only() -> None:
    assert errors.nearest("Adamw", ["Adam", "AdamW"]) == "AdamW"
    assert errors.nearest("adm", ["Adam", "AdamW"]) == "Adam"
