"""The process that measures a model's layers, for `balance = "auto"`."""
