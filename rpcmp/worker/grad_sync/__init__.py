"""Gradients of parameters that several workers have: replicas of a stage, and tied parameters.

Start at `sync.py`. `bucket_allreduce.py` sums over replicas, in the same order at each.
"""
