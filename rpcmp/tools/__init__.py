"""Work before, beside or instead of a run: the modules and packages of most commands.

`verification.py` compares a run with its reference in one process, `diagnosis.py` checks hosts and
links for `rpcmp doctor`, `explain` shows a job, `tuning.py` compares settings, `bench` compares
with peers. `job_hosts.py` and `job_links.py` collect facts for `doctor` and `explain`;
`measurement.py` has the time limits and statistics of `tune` and `bench`. May import job and
everything below.
"""
