"""`rpcmp tune`: which setting of a job is the fastest, measured in one run."""
