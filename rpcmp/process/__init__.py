"""Supervisors and their child processes: starting, isolating, observing and ending them.

Start at `child.py` (the supervisor's side) and `channel.py` (the child's). `__main__.py` is the
fork server and `fork_client.py` its client; `template.py` forks stage servers, and
`template_client.py` is its client. `sandbox/` isolates what is forked; `logging/` carries all log
lines to the supervisor. May import config. Only the fork server imports torch.
"""
