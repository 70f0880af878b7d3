"""slipstream.data."""
