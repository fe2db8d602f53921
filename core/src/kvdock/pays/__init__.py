"""Whether loading a prefix pays: what it costs, what computing costs, what is less."""
