"""Checkpoints on disk: a file a stage, and a manifest that binds them. Pure: no torch, no RPC."""
