"""Every way to ask for torch._dynamo, whatever has been before: each imports it in a process."""

from __future__ import annotations

import pytest

from tests.unit.test_lazydynamo import STEP, USES, require_real


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("before", ["", STEP])
def test_whoever_asks_for_more_gets_the_real_one(use: str, before: str) -> None:
    require_real(use, before)
