"""Measure a backend on this machine."""
