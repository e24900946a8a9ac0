"""The page of a run: what `rpcmp drive --ui` serves while it goes on, and `rpcmp report` writes.

    events ──> state (what the page has to know, bounded) ──> assets/*.js, in a browser

Both show the same: the server sends what has changed of the state, a report holds all of it.
"""
