"""What one host is and has, found out before a run for `rpcmp doctor`."""
