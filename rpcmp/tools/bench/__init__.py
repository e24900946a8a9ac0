"""`rpcmp bench`: step times of a job under rpcmp and under other implementations, in one run."""
