"""kvdock backend that keeps pages in object storage."""
