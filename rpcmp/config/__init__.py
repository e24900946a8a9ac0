"""The configuration of a job: schema, loading, checks, and the import of the user's code.

Start at `schema.py`. Imports `rpcmp.errors` alone. No torch.
"""
