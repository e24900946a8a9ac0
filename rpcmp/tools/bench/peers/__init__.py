"""The peers' processes: what a user would take instead of rpcmp, run as well as it can be run."""
