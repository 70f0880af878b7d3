"""slipstream.recipes."""
