"""Everything that looks at a run: each is told of its events, and none can hold it up."""
