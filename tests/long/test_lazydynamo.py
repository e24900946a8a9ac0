"""Every way to import torch._dynamo, each in its own process."""

from __future__ import annotations

import pytest

from tests.support.dynamo import BEFORE, USES, require_real


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("before", BEFORE)
def test_other_attributes_of_lazy_dynamo_load_the_real_module(use: str, before: str) -> None:
    require_real(use, before)
