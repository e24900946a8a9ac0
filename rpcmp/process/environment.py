"""The environment of a process that computes.

Set by its supervisor, because most of it is read before Python runs. The reference of
`rpcmp verify` gets the same, so that its bits can be compared.
"""

from __future__ import annotations

import os

_MALLOC = {
    # Give big blocks back late and serve all threads from one arena: micro-batches allocate and
    # free the same sizes again and again, and the first touch of fresh memory is slow. What this
    # costs is memory: the holes that one micro-batch leaves are often a few bytes too small for the
    # next. Who has less of that than of time sets these as he likes.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),  # the most that glibc accepts
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}


def compute_environment(threads: int) -> dict[str, str]:
    """Variables for a process whose compute uses `threads` threads.

    MKL_CBWR makes MKL's results independent of how memory is aligned; TP_SOCKET_IFNAME keeps
    TensorPipe, which has no authentication, on the loopback interface.
    """
    return {
        **{key: os.environ.get(key, value) for key, value in _MALLOC.items()},
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MKL_CBWR": "AUTO,STRICT",
        "TP_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        # When a group ends, TensorPipe warns of every connection that closes.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GRPC_VERBOSITY": "ERROR",
    }
