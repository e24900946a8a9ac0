"""Every way to ask for torch._dynamo, whatever has been before: each imports it in a process."""

from __future__ import annotations

import pytest

from tests.support.dynamo import BEFORE, USES, require_real


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("before", BEFORE)
def test_whoever_asks_for_more_gets_the_real_one(use: str, before: str) -> None:
    require_real(use, before)
