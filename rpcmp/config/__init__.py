"""What a job is: the schema of its config, where it is loaded and checked, and its user's code.

Start at `schema.py`. Imports `rpcmp.errors` alone. No torch.
"""
