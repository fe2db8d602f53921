"""kvdock backend that keeps pages in files."""
