"""The proof that a pipelined run has the bits of one process: `reference` is that process."""
