"""Work before, beside or instead of a run: a package per command, and what two of them share.

`verify` compares a run with its reference in one process, `doctor` checks hosts, `explain` shows a
job, `tune` compares settings, `bench` compares with peers, `new` writes a first job. `job_hosts.py`
and `job_links.py` collect facts for `doctor` and `explain`. May import job and everything below.
"""
