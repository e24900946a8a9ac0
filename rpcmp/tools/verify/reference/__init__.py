"""The unsplit model in one process: what `rpcmp verify` compares a pipelined run with."""
