"""The process that counts what a job is made of, for `rpcmp explain`."""
