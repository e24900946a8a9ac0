"""`python -m rpcmp` is the `rpcmp` command."""

from rpcmp.cli import main

main()
