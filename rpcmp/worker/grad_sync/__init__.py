"""Gradients of parameters that several workers have: replicas of a stage, and tied parameters.

Start at `sync.py`; `bucket_allreduce.py` adds up, in the same order everywhere.
"""
