"""`rpcmp bench`: a pipelined job beside what a user would take instead, measured in one run."""
