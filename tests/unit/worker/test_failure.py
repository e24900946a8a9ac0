"""The errors of stages whose code has raised."""

from __future__ import annotations

import pytest
import torch

from rpcmp.errors import DeviceLostError, StageError
from rpcmp.worker.failure import stage_failure


def raised(error: Exception) -> StageError:
    try:
        raise error
    except Exception as caught:
        return stage_failure("b:1", "optimizer", caught, 3, note=" (a note)")


def test_it_names_place_and_cause_and_has_the_traceback() -> None:
    failure = raised(ValueError("no"))
    assert type(failure) is StageError
    assert str(failure) == "stage 'b:1' failed in optimizer at step 3: ValueError: no (a note)"
    assert "raise error" in failure.traceback


@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_a_full_device_is_explained_in_every_phase(phase: str) -> None:
    failure = stage_failure("b", phase, torch.OutOfMemoryError("full"))
    assert type(failure) is StageError
    assert "give it recompute = true" in str(failure)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: uncorrectable ECC error encountered", DeviceLostError),
        ("CUDA error: device-side assert triggered", StageError),  # such as an index out of range
    ],
)
def test_an_error_of_the_driver_is_a_lost_device(
    monkeypatch: pytest.MonkeyPatch, text: str, kind: type[StageError]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert type(raised(torch.AcceleratorError(text))) is kind
