"""The socket from gRPC to a server works only for the process that opened it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tunnels import require_alone


def test_another_process_cannot_use_our_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_alone(tmp_path, caplog)
