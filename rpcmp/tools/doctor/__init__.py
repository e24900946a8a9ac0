"""Before a run: what would go wrong, and how good the hosts and the ways between them are."""
