"""Isolation of the processes that run a job's code, by the kernel.

`confinement.py` puts the parts together: Landlock for files, signals and other processes' memory
(`landlock.py`), dropped capabilities, and seccomp for system calls (`syscall_filter.py`).
`namespace.py` gives the RPC agents a loopback network of their own. May import config.
"""
