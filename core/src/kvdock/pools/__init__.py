"""Pools: what a page of cached state consists of."""
