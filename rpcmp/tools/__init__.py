"""Work before, beside or instead of a run: the modules and packages of most commands.

`verification.py` compares a run with its reference in one process, `diagnosis.py` checks hosts and
links for `rpcmp doctor`, `explain` shows a job, `tuning.py` compares settings, `bench` compares
with peers, `new` writes a first job. `job_hosts.py` and `job_links.py` collect facts for `doctor`
and `explain`. May import job and everything below.
"""
