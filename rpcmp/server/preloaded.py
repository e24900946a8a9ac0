"""What stage servers need, imported and found out once for all that a template forks."""

import contextlib
import encodings.idna  # noqa: F401

import rpcmp.net.security
import rpcmp.server.lifecycle  # noqa: F401
from rpcmp.errors import ConfigError
from rpcmp.server.connection import versions

with contextlib.suppress(ConfigError):  # each server will say so
    versions()
