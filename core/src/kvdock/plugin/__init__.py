"""Backends as plugins: hooks, manifests, discovery, validation."""
