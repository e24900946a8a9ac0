"""Work before, beside or instead of a run; a package per command.

`verify` compares a run with its reference in one process, `doctor` looks at hosts, `explain` at a
job, `tune` at settings, `bench` at the peers; `new` writes a first job. May import job and below.
"""
