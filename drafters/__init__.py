"""Draft heads: the modules that train, decode and are exported."""

from slipstream.drafters.eagle3 import Eagle3Head

DRAFTERS = {"eagle3": Eagle3Head}
