"""Mini-batches: the order of samples, loading, and the slices that stages get.

Start at `batches.py`. May import the packages below: rpc, process, pipelining, config.
"""
