"""What a run will do, before it does it: `rpcmp explain`."""
