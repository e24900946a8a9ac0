"""The lines that `rpcmp drive` prints without a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from rpcmp.cli import progress_output
from tests.support.runevents import typed

STEP = {"event": "step", "step": 2, "epoch": 1, "loss": 0.5, "samples_per_s": 1234.5}
BEGUN = "step 2/2  epoch 1  loss 0.5000  1,234 samples/s"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"busy": {"a": 0.25, "b": 0.5}}, f"{BEGUN}  busy 25% 50%  data 2%"),
        ({"busy": {}}, f"{BEGUN}  data 2%"),  # its stages were lost before they could tell
        (
            {"busy": {}, "loss_scale": 8.0, "is_skipped": True, "skipped_steps": 1},
            f"{BEGUN}  data 2%  scale 8  skipped 1, this one",
        ),
    ],
)
def test_a_step_is_one_line_of_its_known_figures(more: dict[str, Any], line: str) -> None:
    shown: list[str] = []
    show = progress_output.plain(shown.append)
    show(typed({"event": "start", "steps": 2}))
    show(typed({**STEP, "data_share": 0.02, **more}))
    assert shown[-1] == line
