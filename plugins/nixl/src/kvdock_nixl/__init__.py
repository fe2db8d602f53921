"""kvdock backend that keeps pages in files and moves them with NIXL."""
