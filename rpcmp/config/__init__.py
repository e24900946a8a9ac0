"""The config of a job: its schema, its loading and validation, and the import of the user's code.

Start at `schema.py`. Imports `rpcmp.errors` alone. No torch.
"""
