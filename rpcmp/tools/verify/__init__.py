"""`rpcmp verify`: proof that a pipelined run has the bits of one process."""
