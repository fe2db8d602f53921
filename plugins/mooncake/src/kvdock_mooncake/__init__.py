"""kvdock backend that keeps pages in a Mooncake cluster."""
