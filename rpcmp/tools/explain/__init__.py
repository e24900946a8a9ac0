"""`rpcmp explain`: a forecast of a run."""
