"""Everything that proposes tokens in the decoder; the dict of all is in `registry`."""
