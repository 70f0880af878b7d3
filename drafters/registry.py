"""Every kind of draft head by the name recipes use. Not in the package itself: configs need no torch."""

from slipstream.drafters.eagle1 import Eagle1Head
from slipstream.drafters.eagle3 import Eagle3Head
from slipstream.drafters.medusa import MedusaHeads

DRAFTERS = {"eagle3": Eagle3Head, "eagle1": Eagle1Head, "medusa": MedusaHeads}
