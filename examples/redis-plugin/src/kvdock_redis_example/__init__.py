"""An example of a kvdock backend."""
