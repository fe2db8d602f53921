"""kvdock backend that keeps pages in 3FS."""
