"""Where to cut a model whose layers were measured, and what a step will then take. Pure."""
