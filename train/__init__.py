"""slipstream.train."""
