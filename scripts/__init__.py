"""Commands. Thread settings stand here because OpenMP reads them when torch is first imported."""

import os

# Spinning threads make a busy machine several times slower (measured on two cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
