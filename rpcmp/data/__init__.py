"""Mini-batches: which samples, in which order, loaded where, and how their slices come to stages.

Start at `batches.py`. May import what is below: process, pipelining, config.
"""
