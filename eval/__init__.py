"""slipstream.eval."""
