"""What processes have to say to people: from wherever it is said into one log, in one format.

    user's code ──print, warnings, logging──> capture ──fold──> datagrams ──> receiver
        in a worker or the driver's process                                      │ its supervisor
                                            standard error <── show ─────────────┤
                          the driver's log, events <── Watch ── numbered lines <─┘

Nothing that computes ever waits for it: what comes too fast is counted instead, and the counts are
told. What C and C++ code writes to a file descriptor is not touched.
"""
