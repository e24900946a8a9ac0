"""What forwards keep from one call to the next: found, copied, put back, and put into snapshots.

`places.py` finds where it lies, in modules and beside them (`outer_variables.py`); `values.py`
copies and compares it; `forward_state.py` puts it back; `variables_watch.py` tells what stages
share. May import what the worker may.
"""
