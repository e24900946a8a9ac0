"""Log lines of all processes, collected by their supervisor into one log in one format.

    user's code ──print, warnings, logging──> capture ──rate limit──> datagrams ──> receiver
        in a worker or the driver's process                                │ its supervisor
                                            standard error <── display ────┤
                 the driver's log, events <── watchers <── numbered lines <┘

A process that computes never waits for its log: lines that come too fast are counted, and the
counts are logged. What C and C++ code writes to a file descriptor is not captured, except for
confined processes.
"""
