"""Files of a new job: a model and a config that run as they are."""
