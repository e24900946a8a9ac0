"""Metrics for Prometheus: of a run from its events, and of a stage server."""
