"""The figures of a run, and of a stage server, as OpenMetrics for Prometheus."""
