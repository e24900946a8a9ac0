"""What a host needs to compile."""

from __future__ import annotations

import os

import pytest

from rpcmp.errors import ConfigError
from rpcmp.process import compiler


def test_a_host_without_a_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler on .*, which has no no-such"):
        compiler.prepare("/nowhere")
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/no/headers")
    with pytest.raises(ConfigError, match=r"needs /no/headers/Python.h on .*python3-dev"):
        compiler.prepare("/nowhere")
    assert os.environ.get(compiler.CACHE) != "/nowhere"
