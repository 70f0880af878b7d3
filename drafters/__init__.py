"""Draft heads: the modules that train, decode and are exported."""
