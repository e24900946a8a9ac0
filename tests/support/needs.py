"""Programs and rights that tests in tests/system require. The tests fail without them."""

from __future__ import annotations

import os
import shutil

import pytest

PACKAGES = {
    "chromium": "chromium",
    "faketime": "faketime",
    "fish": "fish",
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "prlimit": "util-linux",
    "ss": "iproute2",
    "systemd-analyze": "systemd",
    "tc": "iproute2",
    "umount": "mount",
    "unshare": "util-linux",
    "zsh": "zsh",
}
"""Debian packages, by program."""

SYSTEM = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Folders of programs that an ordinary user's PATH lacks."""


def needs(program: str) -> str:
    """Return the path of a program, or fail the test if it is missing."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM])
    found = shutil.which(program, path=path)
    if found is None:
        package = PACKAGES[program]
        pytest.fail(f"there is no {program} here: install the Debian package {package}", False)
    return found


def needs_root(why: str) -> None:
    """Fail the test unless it runs as root.

    Args:
        why: the action that only root may do.
    """
    if os.geteuid() != 0:
        pytest.fail(f"only root may {why}: run the tests of tests/system as root", False)
