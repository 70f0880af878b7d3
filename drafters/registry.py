"""Every kind of draft head by the name recipes use. Not in the package itself: configs need no torch."""

from slipstream.drafters.eagle3 import Eagle3Head

DRAFTERS = {"eagle3": Eagle3Head}
