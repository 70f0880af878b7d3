"""slipstream.data.target."""
