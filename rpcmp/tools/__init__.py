"""Work before, beside or instead of a run.

`verify` compares a run with its reference in one process, `explain` looks at a job, `tune` at
settings, `bench` at the peers; `new` writes a first job. `diagnosis.py` checks hosts and links for
`rpcmp doctor`. May import job and below.
"""
