"""What a new job begins with: a model file and a config that run as they are."""
