"""slipstream.data.backends."""
