"""What a stage is right after an optimizer step, in memory that outlives the process it is of."""
