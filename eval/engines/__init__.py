"""Real serving engines, each in an environment of its own, beside the built-in decoder."""
