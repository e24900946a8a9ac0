"""Work before, beside or instead of a run: mostly a package per command, and what they share.

`verify` compares a run with its reference in one process, `diagnosis.py` checks hosts and links for
`rpcmp doctor`, `explain` shows a job, `tune` compares settings, `bench` compares with peers, `new`
writes a first job. `job_hosts.py` and `job_links.py` collect facts for `doctor` and `explain`;
`measurement.py` has the time limits and statistics of `tune` and `bench`. May import job and
everything below.
"""
