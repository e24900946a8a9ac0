"""The stage server: a supervisor that outlives many jobs and never imports torch."""
