"""What `torch.compile` needs of a host and a process: a C++ compiler, and a folder.

What is compiled lies in a folder of the job on each host, where its next worker finds it. Never in
`/tmp/torchinductor_USER`, which torch would choose: another user may have made that before, and
torch runs what it finds.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import tempfile
from pathlib import Path

from rpcmp.errors import ConfigError
from rpcmp.process import resources

CACHE = "TORCHINDUCTOR_CACHE_DIR"

COMPILED = "rpcmp-compiled-"
"""Prefix of such folders."""


def prepare(folder: str = "") -> None:
    """Let torch compile in this process, before the first layer is compiled.

    Args:
        folder: for what is compiled; empty: a temporary one.

    Raises:
        ConfigError: this host has no C++ compiler, or no headers of Python.
    """
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"`compile` needs a C++ compiler on {platform.node()}, which has no {compiler}: "
            "install one (Debian's package g++), name another in the environment variable CXX, or "
            "leave `compile` out"
        )
    if not (headers := Path(sysconfig.get_path("include"), "Python.h")).exists():
        raise ConfigError(
            f"`compile` needs {headers} on {platform.node()}: install it (Debian's package "
            "python3-dev), or leave `compile` out"
        )
    if not folder and CACHE not in os.environ:
        folder = str(resources.create_folder(COMPILED))
    if folder:
        os.environ[CACHE] = folder
        tempfile.tempdir = folder  # where torch keeps precompiled headers, whatever CACHE says
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # others would be processes of their own
