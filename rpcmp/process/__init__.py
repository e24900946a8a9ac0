"""Supervisor and child: how the two halves of every host part of rpcmp hold together."""
