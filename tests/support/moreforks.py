"""A fork server that is a fork of another one, and shares its imports; see
tests.support.sharedforks.

It creates its own network, as every fork server does.
"""

from __future__ import annotations

import os
import sys

from rpcmp.process.__main__ import main as serve
from rpcmp.process.fork_client import DRIVERS, WORKERS


def main() -> None:
    """Run the `main` of a fork server, with its arguments."""
    module, line, parent, err = sys.argv
    os.dup2(int(err), 2)
    sys.argv = [module, line, parent, "", WORKERS, DRIVERS]
    serve()
