"""Traces: recorded spans, their clocks, and their analysis. No torch."""
